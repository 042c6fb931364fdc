"""Packed segments in one flat token axis, each with a pointer to the segment that stands in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


def merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join neighbouring half-open ranges `(start, stop)` that touch, in the order given; drop the empty ones."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Layout:
    """A forest of token segments, laid end to end without padding.

    starts: S+1 cumulative starts in tokens, `starts[0] == 0`; segment s is `starts[s]:starts[s + 1]`.
    prefixes: for each segment the index of the earlier segment whose tokens (and, by its own pointer, its
        prefix's tokens) stand in front of it, or -1. A group's completions point to their prompt, prompts may
        point to a few-shot header: each shared token is computed once.

    A segment may be empty. Raises ValueError for anything that is not such a forest.
    """

    starts: tuple[int, ...]
    prefixes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.starts, tuple) or not isinstance(self.prefixes, tuple):
            raise ValueError("Layout: starts and prefixes must be tuples of int (a layout is hashable)")
        if len(self.starts) != len(self.prefixes) + 1:
            raise ValueError(
                f"Layout: {len(self.prefixes)} prefixes need {len(self.prefixes) + 1} starts, got {len(self.starts)}"
            )
        if self.starts[0] != 0:
            raise ValueError(f"Layout: starts[0] must be 0, got {self.starts[0]}")
        for s, prefix in enumerate(self.prefixes):
            if self.starts[s + 1] < self.starts[s]:
                raise ValueError(f"Layout: starts[{s + 1}]={self.starts[s + 1]} is below starts[{s}]={self.starts[s]}")
            if not -1 <= prefix < s:
                raise ValueError(f"Layout: prefixes[{s}]={prefix} must be -1 or an earlier segment")

    @classmethod
    def from_lengths(cls, lengths: list[int], prefixes: list[int]) -> Layout:
        """The layout of segments of these lengths, in tokens."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        return cls(tuple(starts), tuple(prefixes))

    @property
    def n_tokens(self) -> int:
        """Tokens in the flat axis."""
        return self.starts[-1]

    @property
    def n_segments(self) -> int:
        """Number of segments."""
        return len(self.prefixes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment itself, without its prefixes."""
        return tuple(stop - start for start, stop in zip(self.starts, self.starts[1:], strict=False))

    def chain(self, s: int) -> tuple[int, ...]:
        """The segments whose tokens make up the sequence that ends with segment s, root first, s last."""
        if not 0 <= s < self.n_segments:
            raise ValueError(f"Layout.chain: segment {s} is not in 0..{self.n_segments - 1}")
        found = [s]
        while self.prefixes[found[-1]] >= 0:
            found.append(self.prefixes[found[-1]])
        return tuple(reversed(found))

    def prefix_ranges(self, s: int) -> tuple[tuple[int, int], ...]:
        """The flat token ranges that stand in front of segment s, root first, neighbours joined."""
        return merge_ranges([(self.starts[a], self.starts[a + 1]) for a in self.chain(s)[:-1]])

    def prefix_length(self, s: int) -> int:
        """Tokens in front of segment s: the position of its first token."""
        return sum(stop - start for start, stop in self.prefix_ranges(s))

    def positions(self) -> torch.Tensor:
        """Position of each token within its own chain, int64 `[tokens]` on the CPU (for rotary embeddings)."""
        return _positions(self).clone()


@lru_cache(maxsize=16)
def _positions(layout: Layout) -> torch.Tensor:
    ends: list[int] = []
    parts: list[torch.Tensor] = []
    for prefix, length in zip(layout.prefixes, layout.lengths, strict=True):
        first = ends[prefix] if prefix >= 0 else 0
        ends.append(first + length)
        parts.append(torch.arange(first, first + length))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
