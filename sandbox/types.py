"""What goes into the sandbox and what comes out of it: plain frozen data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Compare = Literal["lines", "tokens", "exact"]

VERDICTS = ("AC", "WA", "TLE", "MLE", "OLE", "RE", "CE", "NO_CODE", "INFRA")


class SandboxError(RuntimeError):
    """The machine cannot run jails as asked. Never caused by a graded program; stops a run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one case may use; `program_cpu_seconds` is for all cases of a program together.

    cpu_seconds: CPU time of a case, every process of it counted.
    wall_seconds: how long a case may sleep; None means max(3 * cpu_seconds, cpu_seconds + 2). Time spent
        waiting for a core is not counted against it.
    memory_mb: memory of the whole process tree, /tmp and memory files included, in MiB.
    output_bytes: stdout above this is OLE.
    processes: processes and threads alive at once. tmp_mb: size of /tmp, at most what the pool mounts (64).
    """

    cpu_seconds: float = 2.0
    wall_seconds: float | None = None
    memory_mb: int = 256
    output_bytes: int = 1 << 20
    program_cpu_seconds: float = 60.0
    processes: int = 32
    tmp_mb: int = 16

    @property
    def wall(self) -> float:
        """The wall limit in seconds, derived when it was not given."""
        if self.wall_seconds is not None:
            return self.wall_seconds
        return max(3.0 * self.cpu_seconds, self.cpu_seconds + 2.0)


@dataclass(frozen=True, slots=True)
class StdinCase:
    """One input and the output that is right for it; `accepted` holds further right outputs."""

    input: str
    output: str
    accepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StdinTests:
    """A program reads stdin and writes stdout.

    compare: see `sandbox.compare`. checker: source of a Python program that defines
    `check(input, output, expected) -> bool`; when given, it alone decides, in a jail of its own.
    """

    cases: tuple[StdinCase, ...]
    compare: Compare = "lines"
    checker: str | None = None


@dataclass(frozen=True, slots=True)
class CallCase:
    """Arguments for the entry point and the result that is right, as plain built-in data."""

    args: tuple[object, ...]
    result: object


@dataclass(frozen=True, slots=True)
class CallTests:
    """Calls of a top-level function, of a method of `Solution`, or of `Class.method`."""

    entry_point: str
    cases: tuple[CallCase, ...]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Test code with assert statements, `check(candidate)` or `test_*` functions, about `entry_point`."""

    entry_point: str
    code: str


Tests = StdinTests | CallTests | AssertTests


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """One case: its verdict, CPU and wall seconds, and peak memory in MiB."""

    verdict: str
    cpu_seconds: float
    wall_seconds: float
    memory_mb: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a program did.

    verdict: one of `VERDICTS`. passed and total: cases; those that were not run count as not passed.
    detail: the first failure in words, for a human. soft: tests and program shared an interpreter, so the
    program could have forged the verdict. INFRA means that nothing was learnt about the program.
    """

    verdict: str
    passed: int
    total: int
    cases: tuple[CaseVerdict, ...] = ()
    detail: str = ""
    soft: bool = False
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    memory_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Capability:
    """One protection: whether a program run just now could not break it, and how that was seen."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class CapabilityTable:
    """What `selftest` found on this machine."""

    rows: tuple[Capability, ...]
    python: str = ""
    nsjail: str = ""
    memory_backend: str = field(default="rlimits")

    def missing(self, required: tuple[str, ...]) -> tuple[Capability, ...]:
        """The required rows that are not there. Raises SandboxError for a name that no row has."""
        known = {row.name: row for row in self.rows}
        unknown = [name for name in required if name not in known]
        if unknown:
            raise SandboxError(f"unknown sandbox protection {unknown[0]!r}; known: {', '.join(known)}")
        return tuple(known[name] for name in required if not known[name].ok)
