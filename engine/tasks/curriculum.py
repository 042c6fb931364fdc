"""The order of tasks: every epoch a new shuffle, fixed by the seed; the cursor is two integers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import Task


@dataclass(slots=True)
class Curriculum:
    """Endless shuffled tasks; `epoch` and `position` are all its state."""

    tasks: Sequence[Task]
    seed: int
    epoch: int = 0
    position: int = 0

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; a task comes again only when every other one has been taken."""
        taken: list[Task] = []
        while len(taken) < count:
            order = list(range(len(self.tasks)))
            random.Random(f"curriculum/{self.seed}/{self.epoch}").shuffle(order)
            chosen = order[self.position : self.position + count - len(taken)]
            taken += [self.tasks[i] for i in chosen]
            self.position += len(chosen)
            if self.position == len(order):
                self.epoch, self.position = self.epoch + 1, 0
        return taken
