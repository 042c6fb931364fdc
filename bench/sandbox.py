"""CPU and wall time a graded program: plain Python, nsjail for each case, and the pool.

    python bench/sandbox.py --json OUT [--rounds N] [--soak N] [--starved N]

One ten-case stdin program of about 3 ms CPU a case. Every implementation runs in a process of its own, which
measures its own CPU seconds and those of all its children; rounds are interleaved. `floor` is what ten forks of a
warm interpreter cost without any isolation: the least that a fresh process for each case can cost.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sandbox import Pool, StdinCase, StdinTests, find_nsjail  # noqa: E402
from sandbox.jail import argv, find_interpreter  # noqa: E402

PYTHON = "/usr/bin/python3"
PROGRAM = """\
import sys
import math
import heapq
import itertools
import functools
import re
from collections import Counter, deque


def main():
    data = [int(x) for x in re.findall(r"\\d+", sys.stdin.read())]
    n, values = data[0], data[1:]
    heap = list(values)
    heapq.heapify(heap)
    ordered = [heapq.heappop(heap) for _ in range(n)]
    assert ordered == sorted(values)
    counts = Counter(v % 7 for v in values)
    prefix = list(itertools.accumulate(ordered))
    gcd = functools.reduce(math.gcd, values)
    window = deque(maxlen=5)
    best = 0
    for v in values:
        window.append(v)
        best = max(best, sum(window))
    print(prefix[-1], gcd, best)
    for key in sorted(counts):
        print(key, counts[key])


if __name__ == "__main__":
    main()
"""
WRONG = "import sys\nfrom collections import Counter\nprint(Counter(sys.stdin.read().split()).most_common(1)[0][0])\n"
FLOOR = """\
import sys, os, math, heapq, itertools, functools, re, collections, gc, time, resource
code = compile(open(sys.argv[1]).read(), "p", "exec")
inputs = [open(p).read().encode() for p in sys.argv[3:]]
gc.collect(); gc.freeze()
for _ in range(int(sys.argv[2])):
    before = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    for data in inputs:
        given, out = os.memfd_create("in"), os.memfd_create("out")
        os.write(given, data); os.lseek(given, 0, 0)
        pid = os.fork()
        if pid == 0:
            os.dup2(given, 0); os.dup2(out, 1)
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        os.pread(out, 1 << 20, 0)
        os.close(given); os.close(out)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    print(sum(a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime for a, b in zip(after, before)), wall)
"""


def inputs() -> list[str]:
    """Ten inputs of 200 numbers, always the same."""
    made = []
    state = 12345
    for _ in range(10):
        numbers = []
        for _ in range(200):
            state = (state * 1103515245 + 12345) % (1 << 31)
            numbers.append(state % 100000 + 1)
        made.append(f"{len(numbers)}\n{' '.join(map(str, numbers))}\n")
    return made


def cpu_now() -> float:
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def once(command: list[str], given: str) -> str:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


def plain_command(program: Path) -> list[str]:
    return [PYTHON, "-I", "-S", str(program)]


def jail_command(program: Path) -> list[str]:
    """nsjail with the pool's own flags, once a case, the program mounted and no runner inside."""
    interpreter = find_interpreter(PYTHON, False)
    head = argv(find_nsjail(), interpreter, (), zygote=False)
    return [*head, "-R", f"{program}:/solution.py", "--", interpreter.path, "-I", "-S", "/solution.py"]


def measure_processes(command: list[str], cases: list[StdinCase], programs: int) -> list[tuple[float, float]]:
    """CPU and wall seconds of each program, with one process a case."""
    rows = []
    for _ in range(programs):
        cpu, start = cpu_now(), time.perf_counter()
        for case in cases:
            if once(command, case.input) != case.output:
                raise RuntimeError("the benchmark's own program failed")
        rows.append((cpu_now() - cpu, time.perf_counter() - start))
    return rows


async def _pool(program: str, cases: list[StdinCase], programs: int, verdict: str) -> list[float]:
    tests = StdinTests(tuple(cases))
    walls = []
    async with Pool(1, python=PYTHON) as pool:
        for _ in range(programs):
            start = time.perf_counter()
            got = await pool.grade(program, tests)
            walls.append(time.perf_counter() - start)
            if got.verdict != verdict:
                raise RuntimeError(f"the benchmark's own program got {got}")
            await pool.quiet()
    return walls


def measure_pool(program: str, cases: list[StdinCase], programs: int, verdict: str) -> list[tuple[float, float]]:
    """CPU seconds of each program (nsjail's start, every spare and the host's work included), and its wall seconds.

    The kernel adds a child's CPU time to its parent's when the child is reaped, so the sum is read once the pool is
    closed and divided by the programs.
    """
    cpu = cpu_now()
    walls = asyncio.run(_pool(program, cases, programs, verdict))
    mean = (cpu_now() - cpu) / programs
    return [(mean, wall) for wall in walls]


def measure_floor(program: Path, files: list[Path], programs: int) -> list[tuple[float, float]]:
    """CPU and wall seconds of ten forks of a warm interpreter, in a process of its own."""
    command = [PYTHON, "-S", "-c", FLOOR, str(program), str(programs), *map(str, files)]
    rows = [line.split() for line in once(command, "").splitlines()]
    return [(float(cpu), float(wall)) for cpu, wall in rows]


def child(kind: str, folder: Path, programs: int) -> list[tuple[float, float]]:
    """What one implementation costs; run in a process of its own."""
    program, given = folder / "program.py", inputs()
    cases = [StdinCase(text, (folder / f"out{i}").read_text()) for i, text in enumerate(given)]
    if kind == "floor":
        return measure_floor(program, [folder / f"in{i}" for i in range(len(given))], programs)
    if kind == "plain":
        return measure_processes(plain_command(program), cases, programs)
    if kind == "nsjail-a-case":
        return measure_processes(jail_command(program), cases, programs)
    if kind == "early-stop":
        return measure_pool(WRONG, cases, programs, "WA")
    return measure_pool(PROGRAM, cases, programs, "AC")


def in_a_process(kind: str, folder: Path, programs: int) -> list[tuple[float, float]]:
    """`child` in a fresh interpreter."""
    command = [sys.executable, __file__, "--child", kind, "--folder", str(folder), "--programs", str(programs)]
    return [tuple(row) for row in json.loads(once(command, "").splitlines()[-1])]


async def starved(programs: int) -> dict[str, float]:
    """Honest programs while three busy processes for each core run: how many were called slow."""
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * cores)]
    tests = StdinTests((StdinCase("1\n", "2\n"), StdinCase("2\n", "3\n")))
    verdicts: collections.Counter[str] = collections.Counter()
    try:
        async with Pool(cores, python=PYTHON) as pool:

            async def worker(count: int) -> None:
                for _ in range(count):
                    verdicts[(await pool.grade("print(int(input()) + 1)\n", tests)).verdict] += 1

            await asyncio.gather(*(worker(programs // cores) for _ in range(cores)))
            retries = pool.stats.infra_retries
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return {"false_tle": verdicts["TLE"], "other": sum(verdicts.values()) - verdicts["AC"], "infra_retries": retries}


async def soak(programs: int) -> dict[str, float]:
    """Growth of this process over many programs: memory in MiB, descriptors; and groups that are left."""
    kinds = [
        "print(int(input()) + 1)\n",
        "print(1)\n",
        "1/0\n",
        "print((\n",
        "import os\nif os.fork() == 0:\n  input()\nprint(2)\n",
    ]
    tests = StdinTests((StdinCase("1\n", "2\n"),))
    async with Pool(1, python=PYTHON) as pool:
        for number in range(100):
            await pool.grade(kinds[number % len(kinds)], tests)
        await pool.quiet()
        memory, files = rss_mb(), len(os.listdir("/proc/self/fd"))
        start = time.perf_counter()
        for number in range(programs):
            await pool.grade(kinds[number % len(kinds)], tests)
        seconds = time.perf_counter() - start
        await pool.quiet()
        grown = {"memory_mb": rss_mb() - memory, "descriptors": len(os.listdir("/proc/self/fd")) - files}
    left = list(Path("/sys/fs/cgroup").glob(f"*/rlvr-jails-{os.getpid()}-*"))
    return {**grown, "groups_left": len(left), "programs_per_second": programs / seconds}


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def prepare(folder: Path) -> None:
    """The program, its inputs and its right outputs, where jails can read them."""
    folder.chmod(0o755)
    (folder / "program.py").write_text(PROGRAM)
    for number, given in enumerate(inputs()):
        (folder / f"in{number}").write_text(given)
        (folder / f"out{number}").write_text(once(plain_command(folder / "program.py"), given))
    for file in folder.iterdir():
        file.chmod(0o644)


def rows_of(kind: str, measured: list[tuple[float, float]]) -> list[dict[str, Any]]:
    cpu, wall = [c * 1e3 for c, _ in measured], [w * 1e3 for _, w in measured]
    rows = []
    for metric, values in (("cpu a program", cpu), ("wall a program", wall)):
        figures = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        rows.append({"case": "ten cases", "impl": kind, "metric": metric, "unit": "ms", **figures})
    rate = [1e3 / value for value in wall]
    figures = {"min": min(rate), "median": statistics.median(rate), "max": max(rate)}
    rows.append({"case": "ten cases", "impl": kind, "metric": "programs a second", "unit": "1/s", **figures})
    return rows


def target(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "limit": limit, "better": "lower", "ok": value <= limit}


def compare(rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and targets of the interleaved comparison. CPU by medians over rounds, wall by the least seen."""
    programs = {"floor": 10, "plain": 2, "nsjail-a-case": 2, "pool": 60, "early-stop": 60}
    measured: dict[str, list[tuple[float, float]]] = {kind: [] for kind in programs}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for _ in range(rounds):
            for kind, count in programs.items():
                measured[kind] += in_a_process(kind, Path(name), count)
    rows = [row for kind, values in measured.items() for row in rows_of(kind, values)]
    cpu = {kind: statistics.median(c for c, _ in values) * 1e3 for kind, values in measured.items()}
    wall = {kind: min(w for _, w in values) * 1e3 for kind, values in measured.items()}
    return rows, [
        target("pool's CPU / plain Python's CPU", cpu["pool"] / cpu["plain"], 0.5),
        target("pool's CPU / nsjail-a-case's CPU", cpu["pool"] / cpu["nsjail-a-case"], 0.25),
        target("pool's CPU above the forks' floor, ms", cpu["pool"] - cpu["floor"], 30.0),
        target("pool's wall above the forks' floor, warm spare, least, ms", wall["pool"] - wall["floor"], 8.0),
        target("CPU of a program stopped at its first failure, ms", cpu["early-stop"], 35.0),
    ]


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--starved", type=int, default=5000, help="honest programs under load; 0 leaves them out")
    parser.add_argument("--soak", type=int, default=10000, help="programs in a row; 0 leaves them out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--programs", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.folder, options.programs)))
        return
    rows, targets = compare(options.rounds)
    if options.starved:
        figures = asyncio.run(starved(options.starved))
        rows += [single("load 3x cores", name, value) for name, value in figures.items()]
        targets.append(target(f"false TLE in {options.starved} honest programs at load 3x", figures["false_tle"], 0.0))
    if options.soak:
        figures = asyncio.run(soak(options.soak))
        rows += [single(f"{options.soak} in a row", name, value) for name, value in figures.items()]
        targets.append(target(f"host memory grown over {options.soak} programs, MiB", figures["memory_mb"], 20.0))
    report = {
        "script": "bench/sandbox.py",
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
        "targets": targets,
    }
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def single(case: str, metric: str, value: float) -> dict[str, Any]:
    return {"case": case, "impl": "pool", "metric": metric, "unit": "", "min": value, "median": value, "max": value}


def machine() -> dict[str, Any]:
    load = os.getloadavg()[0]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "arch": platform.machine(),
        "kernel": platform.release(),
        "load": load,
    }


def versions() -> dict[str, str]:
    return {"host": platform.python_version(), "jails": once([PYTHON, "-V"], "").split()[-1]}


def show(report: dict[str, Any]) -> None:
    for row in report["rows"]:
        spread = f"{row['min']:10.2f} {row['median']:10.2f} {row['max']:10.2f} {row['unit']}"
        print(f"{row['case']:<18} {row['impl']:<14} {row['metric']:<20} {spread}")
    for goal in report["targets"]:
        print(f"{'ok  ' if goal['ok'] else 'MISS'} {goal['name']}: {goal['value']:.3f} (limit {goal['limit']})")


if __name__ == "__main__":
    main()
