"""What `Graders` keeps of each grader and of each program; its thread alone writes it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.types import Completion, Graded, Task

Place = Literal["starting", "up", "down", "refused"]
"""`down` is one that was lost and is asked whether it is back; `refused` stays so."""


@dataclass(frozen=True, slots=True)
class GraderStats:
    """One grader since the run began, restarts included."""

    node: str
    """Its name; empty before it first started."""
    state: Place
    pid: int
    programs: int
    """Graded by it."""
    in_flight: int
    most: int
    """Programs that it had at once at most, as it counted itself."""
    restarts: int


@dataclass(slots=True, eq=False)
class Program:
    """A completion that is to be graded."""

    task: Task
    completion: Completion
    opening: str
    future: Future[Graded]
    failed: dict[tuple[int, int], str] = field(default_factory=dict)
    """Why, by the grader and its life, of those whose machine failed on it."""
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A program that a grader has."""

    program: Program
    since: float
    answer: Any
    """Ray's reference; without it Ray would forget the answer."""


@dataclass(slots=True, eq=False)
class Slot:
    """One grader's place: its actor, and what it has."""

    number: int
    actor: Any
    state: Place = "starting"
    node_id: str = ""
    node: str = ""
    why: str = ""
    pid: int = 0
    life: int = 0
    """Counts the times it was lost; what an earlier life answers is not heard."""
    calls: dict[int, Call] = field(default_factory=dict)
    asked: float | None = None
    """When it was asked how it is, unless it has answered; `heard` is when it last did."""
    heard: float = 0.0
    programs: int = 0
    most: int = 0
    retries: int = 0
    earlier_retries: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.number, self.life

    @property
    def title(self) -> str:
        return f"grader {self.number} on {self.node}" if self.node else f"grader {self.number}"
