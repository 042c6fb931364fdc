# ruff: noqa: E501  (programs as one-line strings)
"""The pool itself: what survives, what is left behind, what counts as the machine's fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox import (
    Limits,
    Pool,
    SandboxError,
    StdinCase,
    StdinTests,
    cgroup,
    jail,
)
from sandbox.watch import tree
from tests.sandbox.conftest import HONEST, INC, LIMITS, Bench, descriptors, is_zombie, rss_mb

ROOT = Path(__file__).resolve().parents[2]
SLOW = "import time\nfor _ in range(6): time.sleep(.1)\nprint(int(input())+1)"
PROGRAMS = int(os.environ.get("RLVR_SOAK_PROGRAMS", "150"))


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Pools with other settings, closed at the end."""
    made: list[Bench] = []

    def make(workers: int = 1, **settings: object) -> Bench:
        bench = Bench(Pool(workers, **settings))  # type: ignore[arg-type]
        made.append(bench)
        return bench

    yield make
    for bench in made:
        bench.close()


def groups_of(pid: int) -> list[Path]:
    hierarchy = cgroup.find_hierarchy()[0]
    return sorted(hierarchy.memory.glob(f"{cgroup.PREFIX}{pid}-*")) if hierarchy else []


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Poll; whether it became true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return true()


def kill_while_running(bench: Bench, number: int, victim: Callable[[], int], times: int) -> threading.Thread:
    """A thread that kills the `victim` of each of the next `times` programs once it runs."""

    def killer() -> None:
        for _ in range(times):
            before = bench.pool.stats.infra_retries
            if not wait_until(lambda: bench.pool._running > 0 and victim() > 0):
                return
            time.sleep(0.2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim(), number)
            wait_until(lambda before=before: bench.pool.stats.infra_retries > before or bench.pool._running == 0)

    thread = threading.Thread(target=killer)
    thread.start()
    return thread


def busy_runner(bench: Bench) -> int:
    """Pid 1 of the jail that a case runs in; 0 if none does."""
    for zygote in bench.pool._zygotes:
        for pid in tree(zygote.pid):
            if pid not in bench.expected_inmates() and len(tree(pid)) == 1:
                return pid
    return 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_nsjail_is_a_fault_that_is_mended(make_bench: Callable[..., Bench], number: int) -> None:
    bench = make_bench(backoff=(0.05, 0.1, 0.2))
    bench.run(bench.pool.quiet())
    nsjail = bench.pool._zygotes[0].pid
    killer = kill_while_running(bench, number, lambda: nsjail, 1)
    verdict = bench.grade(SLOW, INC)
    killer.join()
    assert verdict.verdict == "AC"
    assert bench.pool.stats.infra_retries >= 1
    assert bench.pool.stats.last_fault
    assert wait_until(lambda: not os.path.exists(f"/proc/{nsjail}"))
    assert bench.inmates() == bench.expected_inmates()


def test_a_machine_that_fails_every_time_stops_the_run(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(backoff=(0.05, 0.05, 0.05))
    bench.run(bench.pool.quiet())

    def newest() -> int:
        return bench.pool._zygotes[-1].pid if bench.pool._zygotes and busy_runner(bench) else 0

    killer = kill_while_running(bench, signal.SIGKILL, newest, 4)
    with pytest.raises(SandboxError, match=r"nsjail .*4 tries"):
        bench.grade(SLOW, INC)
    killer.join()
    assert bench.grade(HONEST).verdict == "AC"


def test_an_nsjail_that_goes_missing_is_named(
    make_bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "nsjail"
    mine.write_text(f'#!/bin/sh\nexec {jail.find_nsjail()} "$@"\n')  # its libraries stand beside it
    mine.chmod(0o755)
    monkeypatch.setattr("sandbox.pool.find_nsjail", lambda: str(mine))
    bench = make_bench(backoff=(0.05, 0.05, 0.05), recycle=1)
    bench.grade(HONEST)
    mine.unlink()

    def grade_all() -> None:
        for _ in range(4):  # spares that stand ready still work
            bench.grade(HONEST)

    with pytest.raises(SandboxError, match=r"nsjail is gone: .*/nsjail.*4 tries"):
        grade_all()


def test_a_program_whose_jail_always_dies_is_at_fault_if_honest_ones_pass(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(backoff=(0.05, 0.05, 0.05))
    killer = kill_while_running(bench, signal.SIGKILL, lambda: busy_runner(bench), 4)
    verdict = bench.grade(SLOW, INC)
    killer.join()
    assert verdict.verdict == "RE"
    assert "honest" in verdict.detail


def test_a_fault_narrows_the_pool_and_good_programs_widen_it(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(2, backoff=(0.05, 0.05, 0.05))
    bench.run(bench.pool.quiet())
    killer = kill_while_running(bench, signal.SIGKILL, lambda: busy_runner(bench), 1)
    assert bench.grade(SLOW, INC).verdict == "AC"
    killer.join()
    assert bench.pool.stats.width == 1
    for _ in range(32):
        assert bench.grade(HONEST).verdict == "AC"
    assert bench.pool.stats.width == 2


_HOST = """
import asyncio, sys
from sandbox import Pool, StdinCase, StdinTests, Limits
async def main():
    async with Pool(2) as pool:
        tests = StdinTests((StdinCase("", ""),))
        work = [asyncio.create_task(pool.grade("import time; time.sleep(600)", tests, Limits(wall_seconds=600.0))) for _ in range(2)]
        await asyncio.sleep(1.5)
        print(" ".join(str(z.pid) for z in pool._zygotes), flush=True)
        await asyncio.gather(*work)
asyncio.run(main())
"""


def test_a_killed_host_leaves_nothing(tmp_path: Path) -> None:
    host = subprocess.Popen([sys.executable, "-c", _HOST], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    nsjails = [int(pid) for pid in host.stdout.readline().split()]
    inside = [pid for nsjail in nsjails for pid in tree(nsjail)]
    assert len(nsjails) == 2
    assert len(inside) >= 6  # each with its zygote, a runner and a case
    assert groups_of(host.pid)
    host.kill()
    host.wait()
    host.stdout.close()
    assert wait_until(lambda: all(is_zombie(pid) for pid in [*nsjails, *inside])), "a process is left"
    assert wait_until(lambda: not groups_of(host.pid)), "a cgroup is left"


def test_closing_leaves_nothing(make_bench: Callable[..., Bench]) -> None:
    files, mounts, threads = descriptors(), Path("/proc/self/mounts").read_text(), threading.active_count()
    bench = Bench(Pool(2))
    assert bench.grade(HONEST).verdict == "AC"
    nsjails = [zygote.pid for zygote in bench.pool._zygotes]
    groups = [group.folder for group in bench.pool._groups]
    assert groups
    bench.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in nsjails)
    assert not any(group.exists() for group in groups)
    assert descriptors() == files
    assert Path("/proc/self/mounts").read_text() == mounts
    assert threading.active_count() <= threads + 2  # asyncio's own executor may keep a thread


def test_cancelled_grading_leaves_nothing(bench: Bench) -> None:
    async def cancel(after: float) -> None:
        task = asyncio.get_running_loop().create_task(bench.pool.grade("while 1: pass", INC, LIMITS))
        await asyncio.sleep(after)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    files = descriptors()
    for after in (0.0, 0.001, 0.005, 0.02, 0.1):
        bench.run(cancel(after))
    bench.run(bench.pool.quiet())
    assert bench.inmates() == bench.expected_inmates()
    assert descriptors() <= files + 2
    assert bench.pool._running == 0
    assert bench.grade(HONEST).verdict == "AC"


def test_many_programs_in_a_row_leave_nothing(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(recycle=50)
    kinds = [
        HONEST,
        "print(1)",
        "1/0",
        "print((",
        "import os\nif os.fork()==0:\n  import time; time.sleep(9)\nprint(int(input())+1)",
    ]
    for kind in kinds * 4:
        bench.grade(kind)
    files, memory, groups = descriptors(), rss_mb(), len(groups_of(os.getpid()))
    for number in range(PROGRAMS):
        bench.grade(kinds[number % len(kinds)])
    assert descriptors() <= files + 2
    assert rss_mb() - memory < 20
    assert len(groups_of(os.getpid())) == groups
    assert bench.inmates() == bench.expected_inmates()
    assert bench.pool.stats.nsjails >= PROGRAMS // 50
    assert bench.pool.stats.infra_retries == 0


def test_the_thread_that_started_a_jail_may_end(bench: Bench) -> None:
    made: list[Bench] = []
    starter = threading.Thread(target=lambda: made.append(Bench(Pool(1))))
    starter.start()
    starter.join()
    try:
        assert made[0].grade(SLOW, INC).verdict == "AC"
        assert made[0].pool.stats.infra_retries == 0
    finally:
        made[0].close()


def test_a_leaked_descriptor_of_the_host_does_not_reach_a_jail(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    leaked = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        program = (
            "import os\nl=[]\nfor f in range(1024):\n  try: os.fstat(f); l.append(f)\n  except OSError: pass\nprint(l)"
        )
        assert make_bench().grade(program, StdinTests((StdinCase("", "[0, 1, 2]\n"),))).verdict == "AC"
    finally:
        os.close(leaked)


def test_programs_run_side_by_side(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(2)

    async def many() -> list[str]:
        programs = [HONEST if n % 3 else "print(0)" for n in range(24)]
        return [v.verdict for v in await asyncio.gather(*(bench.pool.grade(p, INC, LIMITS) for p in programs))]

    assert bench.run(many()) == ["AC" if n % 3 else "WA" for n in range(24)]
    bench.run(bench.pool.quiet())
    assert bench.inmates() == bench.expected_inmates()


def test_a_whole_nsjail_for_each_program(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(recycle=1)
    for _ in range(4):
        assert bench.grade(HONEST).verdict == "AC"
    assert bench.pool.stats.nsjails >= 5
    assert len(bench.pool._zygotes) <= 2


def test_starved_programs_are_not_called_slow(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(2)
    busy = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(3 * len(os.sched_getaffinity(0)))]
    try:
        verdicts = [bench.grade(HONEST, INC, Limits(cpu_seconds=0.5, wall_seconds=0.3)) for _ in range(10)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [verdict.verdict for verdict in verdicts] == ["AC"] * 10, verdicts


def test_numpy_where_it_is_asked_for(make_bench: Callable[..., Bench]) -> None:
    program = "import numpy as np\nprint(int(np.array([int(input()), 1]).sum()))"
    assert make_bench(numpy=True).grade(program, INC, Limits(memory_mb=512)).verdict == "AC"


def test_without_cgroups_memory_has_the_bounds_that_rlimits_give(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(use_cgroups=False)
    assert bench.pool.memory_backend == "rlimits"
    assert bench.grade("x=[0]\nwhile 1: x=x+x").verdict == "MLE"
    shared = "import os,ctypes\ntry: os.memfd_create('x'); print('made')\nexcept OSError: print(ctypes.CDLL(None).shmget(0,4096,0o1666))"
    assert bench.grade(shared, StdinTests((StdinCase("", "-1\n"),))).verdict == "AC"
    big_stack = "import threading\nthreading.stack_size(1<<29)\nt=threading.Thread(target=lambda: print(int(input())+1))\nt.start(); t.join()"
    assert bench.grade(big_stack).verdict == "AC"


def test_only_light_modules_come_with_the_sandbox() -> None:
    code = (
        "import sys, sandbox, sandbox.selftest, engine.reward.extract\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy', 'click', 'pydantic') if m in sys.modules])"
    )
    code = code.replace(", engine.reward.extract", "")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
