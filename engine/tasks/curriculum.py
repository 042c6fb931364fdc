"""The order of tasks: every epoch a new shuffle, fixed by the seed; the cursor is two integers and what came back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.types import Task


@dataclass(slots=True)
class Curriculum:
    """Endless shuffled tasks; `epoch`, `position` and `again` are all its state."""

    tasks: Sequence[Task]
    seed: int
    epoch: int = 0
    position: int = 0
    again: list[Task] = field(default_factory=list)
    """Taken before and given back: they come first."""

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; a task comes again only when every other one has been taken."""
        taken, self.again = self.again[:count], self.again[count:]
        while len(taken) < count:
            order = list(range(len(self.tasks)))
            random.Random(f"curriculum/{self.seed}/{self.epoch}").shuffle(order)
            chosen = order[self.position : self.position + count - len(taken)]
            taken += [self.tasks[i] for i in chosen]
            self.position += len(chosen)
            if self.position == len(order):
                self.epoch, self.position = self.epoch + 1, 0
        return taken
