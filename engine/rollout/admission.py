"""In which order requests enter vLLM, so that a prompt's shared beginning is computed once.

vLLM's prefix cache holds whole blocks that are already computed: requests of one group that enter in the same engine
step each compute the prompt again. So the first one goes ahead, and the others wait until its blocks stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.rollout.messages import Group

Prefix = tuple[int, ...]


@dataclass(slots=True)
class Admission:
    """Requests that wait, and the prompt blocks that are computed or being computed."""

    block_size: int
    step_tokens: int
    """Prompt tokens that one engine step computes at most."""
    _waiting: deque[tuple[Group, int]] = field(default_factory=deque)
    _computed: set[Prefix] = field(default_factory=set)
    _coming: set[Prefix] = field(default_factory=set)
    _steps_left: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: Group) -> None:
        """Queue every member of a group that is asked for."""
        self._waiting.extend((group, member) for member in group.asked)

    def drop(self, groups: Collection[int]) -> None:
        """Forget the members of these groups that still wait."""
        self._waiting = deque((group, member) for group, member in self._waiting if group.group not in groups)

    def forget(self) -> None:
        """The cache was dropped: nothing is computed any more."""
        self._computed.clear()

    def next_wave(self) -> list[tuple[Group, int]]:
        """What may enter before the next engine step; call it once for each step."""
        if self._steps_left > 0:
            self._steps_left -= 1
            if self._steps_left > 0:
                return []
            self._computed |= self._coming
            self._coming = set()
        wave: list[tuple[Group, int]] = []
        later: deque[tuple[Group, int]] = deque()
        new_tokens = 0
        for group, member in self._waiting:
            blocks = self._blocks(group.prompt_ids)
            if any(block in self._coming for block in blocks):
                later.append((group, member))
                continue
            fresh = [block for block in blocks if block not in self._computed]
            self._coming.update(fresh)
            new_tokens += len(group.prompt_ids) - (len(blocks) - len(fresh)) * self.block_size
            wave.append((group, member))
        self._waiting = later
        if self._coming:
            self._steps_left = max(1, -(-new_tokens // self.step_tokens))
        return wave

    def _blocks(self, prompt: Prefix) -> list[Prefix]:
        return [prompt[:end] for end in range(self.block_size, len(prompt), self.block_size)]
