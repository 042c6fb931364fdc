"""Layout: a forest of segments, its chains, ranges and positions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import Layout, merge_ranges


@st.composite
def layouts(draw: st.DrawFn, max_segments: int = 8, max_length: int = 9) -> Layout:
    count = draw(st.integers(1, max_segments))
    lengths = [draw(st.integers(0, max_length)) for _ in range(count)]
    return Layout.from_lengths(lengths, [draw(st.integers(-1, s - 1)) for s in range(count)])


@given(layouts())
def test_positions_count_the_tokens_in_front(layout: Layout) -> None:
    positions = layout.positions()
    assert positions.dtype == torch.int64
    assert len(positions) == layout.n_tokens
    for s in range(layout.n_segments):
        front = sum(layout.lengths[a] for a in layout.chain(s)[:-1])
        assert layout.prefix_length(s) == front
        own = positions[layout.starts[s] : layout.starts[s + 1]].tolist()
        assert own == list(range(front, front + layout.lengths[s]))


@given(layouts())
def test_chain_ends_with_the_segment_and_ranges_cover_the_chain(layout: Layout) -> None:
    for s in range(layout.n_segments):
        chain = layout.chain(s)
        assert chain[-1] == s
        assert layout.prefixes[chain[0]] == -1
        assert all(layout.prefixes[b] == a for a, b in itertools.pairwise(chain))
        covered = [t for start, stop in layout.prefix_ranges(s) for t in range(start, stop)]
        assert covered == [t for a in chain[:-1] for t in range(layout.starts[a], layout.starts[a + 1])]


def test_positions_of_a_group_that_shares_its_prompt() -> None:
    layout = Layout.from_lengths([3, 2, 1, 2], [-1, 0, 1, 1])
    assert layout.positions().tolist() == [0, 1, 2, 3, 4, 5, 5, 6]
    layout.positions().zero_()
    assert layout.positions().tolist() == [0, 1, 2, 3, 4, 5, 5, 6], "a caller's change must not reach the cache"


@pytest.mark.parametrize(
    ("starts", "prefixes", "message"),
    [
        ((1, 2), (-1,), r"starts\[0\]"),
        ((0, 3, 2), (-1, -1), r"starts\[2\]"),
        ((0, 1), (0,), r"prefixes\[0\]"),
        ((0, 1, 2), (-1, -2), r"prefixes\[1\]"),
        ((0, 1), (-1, 0), "2 prefixes need 3 starts"),
        ([0, 1], (-1,), "tuples"),
    ],
)
def test_what_is_no_forest_is_refused(starts: tuple[int, ...], prefixes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(starts, prefixes)


def test_chain_of_an_unknown_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="segment 2"):
        Layout((0, 1, 2), (-1, -1)).chain(2)


def test_merge_ranges_joins_neighbours_and_drops_empty_ones() -> None:
    assert merge_ranges([(0, 2), (2, 2), (2, 5), (7, 8)]) == ((0, 5), (7, 8))
