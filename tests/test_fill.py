"""Dynamic sampling: which groups make up a batch, and how many are sampled for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fill import Round, fill_batch
from tests.conftest import completion, graded


class Source:
    """Groups in a fixed order, each with a signal or without; remembers what it was asked for."""

    def __init__(self, signals: list[bool]) -> None:
        self.signals = signals
        self.asked: list[int] = []
        self.next = 0

    def __call__(self, count: int, rounds: int) -> Round:
        assert rounds == len(self.asked)
        self.asked.append(count)
        numbers = range(self.next, self.next + count)
        self.next += count
        signals = [self.signals[n % len(self.signals)] for n in numbers]
        groups = [[graded(completion(n, m, (1,), (2,)), float(m)) for m in range(2)] for n in numbers]
        return groups, [[0.5, -0.5] if signal else [0.0, 0.0] for signal in signals]


def test_without_either_everything_is_the_batch() -> None:
    source = Source([True, False])
    sampled = fill_batch(source, 4, version=0)
    assert (source.asked, list(sampled.trained), sampled.rounds) == ([4], [0, 1, 2, 3], 1)


def test_missing_groups_are_sampled_again_and_the_rest_is_left_out() -> None:
    source = Source([False, True, True, False])
    sampled = fill_batch(source, 4, version=0, refill=3)
    assert (source.asked, list(sampled.trained), sampled.rounds) == ([4, 2, 1], [1, 2, 5, 6], 3)
    assert len(sampled.groups) == len(sampled.advantages) == 7


def test_a_full_batch_is_not_sampled_for_again() -> None:
    source = Source([True])
    sampled = fill_batch(source, 3, version=0, oversample=2, refill=5)
    assert (source.asked, list(sampled.trained)) == ([5], [0, 1, 2])


def test_the_bound_ends_a_source_without_signal() -> None:
    source = Source([False])
    sampled = fill_batch(source, 3, version=0, oversample=1, refill=2)
    assert (source.asked, list(sampled.trained), sampled.rounds) == ([4, 4, 4], [], 3)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 3), st.integers(0, 4))
def test_the_batch_is_the_first_groups_with_a_signal(
    signals: list[bool], wanted: int, oversample: int, refill: int
) -> None:
    source = Source(signals)
    sampled = fill_batch(source, wanted, version=0, oversample=oversample, refill=refill)
    assert len(source.asked) == sampled.rounds <= refill + 1
    assert sum(source.asked) == len(sampled.groups)
    having = [i for i, row in enumerate(sampled.advantages) if any(row)]
    if oversample + refill:
        assert list(sampled.trained) == having[:wanted]
        assert len(sampled.trained) == wanted or sampled.rounds == refill + 1
    else:
        assert list(sampled.trained) == list(range(wanted))


@pytest.mark.parametrize("wanted", [1, 5])
def test_a_group_belongs_to_one_round(wanted: int) -> None:
    sampled = fill_batch(Source([False, True]), wanted, version=0, refill=4)
    numbers = [group[0].completion.group for group in sampled.groups]
    assert numbers == list(range(len(numbers)))
