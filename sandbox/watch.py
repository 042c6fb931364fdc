"""Is a case slow, asleep, or starved? Read from the kernel's per-thread scheduling figures, on the host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sandbox.inside import runner
from sandbox.types import Limits

# A case that is neither out of CPU time nor asleep is waiting for a core: give it this much longer.
PATIENCE = 5.0
EXTRA_SECONDS = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """All living descendants of `pid`, itself not among them; what ends meanwhile is left out."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for task in _tasks(waiting.pop()):
            try:
                children = [int(child) for child in Path(task, "children").read_text().split()]
            except OSError:
                continue
            found += children
            waiting += children
    return found


def _tasks(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def scheduled(pid: int) -> tuple[float, float]:
    """Seconds that the threads of `pid` have run, and have waited for a core."""
    ran = waited = 0
    for task in _tasks(pid):
        try:
            fields = Path(task, "schedstat").read_text().split()
        except OSError:
            continue
        if len(fields) >= 2:
            ran += int(fields[0])
            waited += int(fields[1])
    return ran / 1e9, waited / 1e9


def cpu_of(pid: int) -> float:
    """CPU seconds of a living process."""
    return scheduled(pid)[0]


def used_by(pid: int) -> float:
    """CPU seconds of a process and of its children that it has waited for, in steps of a clock tick."""
    return _stat(pid, (11, 12, 13, 14))


def children_used(pid: int) -> float:
    """CPU seconds of the children that `pid` has waited for."""
    return _stat(pid, (13, 14))


def _stat(pid: int, places: tuple[int, ...]) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(fields[place]) for place in places) / _TICKS


@dataclass(slots=True)
class Observer:
    """Decides at each tick of a long case whether it goes on."""

    runner_pid: int
    reaped_before: float  # CPU seconds of earlier cases, which the runner has reaped
    limits: Limits
    busiest: float = 0.0

    def judge(self, wall: float, used: float) -> int:
        """A reason to kill the case, or `runner.ALIVE`. wall: seconds it has run; used: its first process's CPU."""
        processes = tree(self.runner_pid)
        orphans = max(0.0, children_used(self.runner_pid) - self.reaped_before)
        total = max(used, orphans + sum(used_by(pid) for pid in processes))
        if total >= self.limits.cpu_seconds:
            return runner.HOST_CPU
        if wall < self.limits.wall:
            return runner.ALIVE
        self.busiest = max([self.busiest, *(sum(scheduled(pid)) for pid in processes)])
        if self.busiest < wall / 2:
            return runner.WALL
        if wall >= self.limits.wall * PATIENCE + EXTRA_SECONDS:
            return runner.STARVED
        return runner.ALIVE
