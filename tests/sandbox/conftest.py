"""A pool on an event loop of its own thread, as the trainer has it, and what must hold after every program."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sandbox import CallCase, CallTests, Limits, Pool, StdinCase, StdinTests, Tests, Verdict
from sandbox.watch import tree

T = TypeVar("T")

INC = StdinTests((StdinCase("1\n", "2\n"), StdinCase("2\n", "3\n"), StdinCase("3\n", "4\n")))
F = CallTests("f", (CallCase((41,), 42),))
LIMITS = Limits(cpu_seconds=0.5, memory_mb=128)
HONEST = "print(int(input()) + 1)\n"


class Bench:
    """A pool and the thread of its loop; synchronous for tests."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.run(pool.__aenter__())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, or what it raised."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=120)

    def grade(
        self, program: str, tests: Tests = INC, limits: Limits = LIMITS, *, stop_at_first_failure: bool = True
    ) -> Verdict:
        """One verdict, once every jail of it is gone."""
        verdict = self.run(self.pool.grade(program, tests, limits, stop_at_first_failure=stop_at_first_failure))
        self.run(self.pool.quiet())
        return verdict

    def close(self) -> None:
        """End the pool and its thread."""
        try:
            self.run(self.pool.__aexit__(None, None, None))
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    def inmates(self) -> set[int]:
        """Processes in the pool's memory groups, by the kernel's own list."""
        found: set[int] = set()
        for group in self.pool._groups:
            found |= {int(pid) for pid in (group.folder / "cgroup.procs").read_text().split()}
        return found

    def expected_inmates(self) -> set[int]:
        """The spares that wait."""
        return {spare.result().pid for spare in self.pool._spares if spare.done()}


def is_zombie(pid: int) -> bool:
    """Dead, and about to be reaped, or already gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def rss_mb() -> float:
    """This process's resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    """One worker, so that the next program is on the same one."""
    made = Bench(Pool(1, backoff=(0.05, 0.1, 0.2)))
    yield made
    made.close()


@pytest.fixture
def attack(bench: Bench) -> Callable[..., Verdict]:
    """Grade a hostile program, then check that the host and the pool are as they were."""

    def grade(program: str, tests: Tests = INC, limits: Limits = LIMITS, **options: bool) -> Verdict:
        bench.run(bench.pool.quiet())
        files, memory, mounts = descriptors(), rss_mb(), Path("/proc/self/mounts").read_text()
        faults = bench.pool.stats.infra_retries
        start = time.monotonic()
        verdict = bench.grade(program, tests, limits, **options)
        wall = time.monotonic() - start
        cases = max(1, len(verdict.cases))
        assert bench.inmates() == bench.expected_inmates(), "a process is left"
        for zygote in bench.pool._zygotes:
            living = [pid for pid in tree(zygote.pid) if not is_zombie(pid)]
            assert len(living) == 1 + len(bench.expected_inmates()), "a process is left below nsjail"
        assert Path("/proc/self/mounts").read_text() == mounts, "a mount is left"
        assert descriptors() <= files + 2, "a descriptor is left"
        assert rss_mb() - memory < 50, "the host's memory grew"
        crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # others may use the same cores
        assert wall <= (cases * (limits.wall + 2) + 2) * crowd, f"it took {wall:.1f} s"
        assert bench.pool.stats.infra_retries == faults, f"a fault: {bench.pool.stats.last_fault}"
        assert bench.grade(HONEST).verdict == "AC", "the next honest program fails"
        return verdict

    return grade
