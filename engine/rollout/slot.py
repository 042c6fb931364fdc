"""What `Samplers` keeps of each sampler, and what it tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.rollout.messages import SamplerConfig
from engine.rollout.sampler import Sampler


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """What one sampler has done since the run began, restarts included."""

    place: str
    """Where it runs."""
    up: bool
    """It has the weights of now; one that is not is starting."""
    completions: int
    tokens: int
    busy_seconds: float
    """Spent in vLLM's steps."""
    unfinished: int
    restarts: int
    resampled: int
    """Completions that were lost on the way, with their sampler or alone, and asked for again."""
    memory_mb: float


@dataclass(slots=True, eq=False)
class Slot:
    """One sampler's place: its process now, and what it owes."""

    number: int
    config: SamplerConfig
    process: Sampler
    up: bool = False
    """Its process is bound and has the weights of now; until then it owes nothing."""
    owed: dict[int, set[int]] = field(default_factory=dict)
    """Members that are still to land, by group."""
    load: int = 0
    """How many those are."""
    submits: int = 0
    asked: float = 0.0
    """When it was last given work."""
    deaths: int = 0
    """Since a completion landed."""
    restarts: int = 0
    resampled: int = 0
    completions: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    """The last two: of its earlier processes."""

    @property
    def title(self) -> str:
        return f"sampler {self.number} on {self.process.place}"

    @property
    def owing(self) -> str:
        return f"{self.load} completions of group {', '.join(map(str, self.owed))}" if self.owed else "nothing"

    def stats(self) -> SamplerStats:
        """As of its last heartbeat."""
        beat = self.process.beat
        return SamplerStats(
            self.process.place,
            self.up,
            self.completions,
            self.tokens + beat.tokens,
            self.busy_seconds + beat.busy_seconds,
            self.load,
            self.restarts,
            self.resampled,
            beat.memory_mb,
        )
