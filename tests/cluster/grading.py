"""Graders on the nodes of a Ray cluster: the local grader's verdicts, each once, whatever happens to a node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from engine.cluster.connect import joined
from engine.cluster.graders import Graders
from engine.errors import RunError
from engine.recipe import Cluster, Reward, Sandbox
from engine.reward import Grader
from engine.types import Completion, Graded, Task
from sandbox import CallCase, CallTests, SandboxError, StdinCase, StdinTests
from sandbox.cgroup import PREFIX, find_hierarchy
from sandbox.jail import find_nsjail
from sandbox.watch import tree
from tests.cluster.conftest import Machines
from tests.conftest import completion
from tests.sandbox.conftest import is_zombie

pytestmark = pytest.mark.slow

STDIN = Task("inc", "?", StdinTests(tuple(StdinCase(f"{n}\n", f"{n + 1}\n") for n in range(3))))
CALL = Task("call", "?", CallTests("f", (CallCase((41,), 42), CallCase((0,), 1))))
REWARD = Reward(passed=1.0, share=0.5, format=0.1)
INC = "print(int(input()) + 1)"
ANSWERS = (
    (STDIN, f"```python\n{INC}\n```"),
    (STDIN, "```python\nprint(2)\n```"),
    (STDIN, "I can't."),
    (STDIN, "```python\nprint(\n```"),
    (CALL, "```python\ndef f(x): return x + 1\n```"),
    (CALL, "```python\ndef f(x): return 42\n```"),
)


def answer(number: int, task: Task, text: str) -> Completion:
    return replace(completion(number, 0, (1, 2), (3, 4, 5), task_id=task.id), text=text)


def sleeper(number: int, seconds: float) -> Completion:
    return answer(number, STDIN, f"```python\nimport time\ntime.sleep({seconds})\n{INC}\n```")


def verdict(graded: Graded) -> tuple[object, ...]:
    seen = graded.verdict
    return graded.completion, graded.program, seen.verdict, seen.passed, seen.total, graded.reward, dict(graded.parts)


def eventually(holds: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come to hold"
        time.sleep(0.05)


def jails_of(pids: set[int]) -> list[Path]:
    """Memory groups of pools of these processes."""
    hierarchy = find_hierarchy()[0]
    assert hierarchy is not None
    return [f for f in hierarchy.memory.glob(f"{PREFIX}*") if int(f.name.removeprefix(PREFIX).split("-")[0]) in pids]


class Book:
    """Submits, and counts how often each future is done."""

    def __init__(self, graders: Graders) -> None:
        self.graders, self.done = graders, dict[int, int]()
        self.futures: list[Future[Graded]] = []

    def submit(self, task: Task, item: Completion) -> None:
        future = self.graders.submit(task, item)
        number = len(self.futures)
        self.futures.append(future)
        future.add_done_callback(lambda _: self.done.update({number: self.done.get(number, 0) + 1}))

    def results(self, seconds: float = 60.0) -> list[Graded]:
        _, late = wait(self.futures, timeout=seconds)
        assert not late, f"{len(late)} of {len(self.futures)} did not come: {self.graders.stats()}"
        assert set(self.done.values()) == {1}
        return [future.result() for future in self.futures]


@pytest.fixture(scope="module")
def ready(machines: Machines) -> Iterator[Machines]:
    """The driver's node takes no grader; left and right take one each, with an nsjail package of their own."""
    machines.add("driver", cpus=0)
    for name in ("left", "right"):
        own_nsjail(machines.folder / f"{name}-packages")
        machines.add(name, cpus=1, PYTHONPATH=packages(machines, name))
    with joined(Cluster(address=machines.address)):
        yield machines


def packages(machines: Machines, name: str) -> str:
    return f"{machines.folder / f'{name}-packages'}:{Path(__file__).resolve().parents[2]}"


def own_nsjail(folder: Path) -> Path:
    """A package nsjail in `folder` whose binary can be replaced."""
    binary = folder / "nsjail" / "bin" / "nsjail"
    binary.parent.mkdir(parents=True, exist_ok=True)
    (folder / "nsjail" / "__init__.py").touch()
    binary.write_text(f'#!/bin/sh\nexec {find_nsjail()} "$@"\n')
    binary.chmod(0o755)
    return binary


def break_nsjail(folder: Path) -> None:
    (folder / "nsjail" / "bin" / "nsjail").write_text("#!/bin/sh\necho this machine has no namespaces >&2\nexit 255\n")


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def graders(ready: Machines, said: list[str]) -> Iterator[Graders]:
    cluster = Cluster(address=ready.address, graders=2)
    with closing(Graders(cluster, Sandbox(workers=2), REWARD, said.append)) as made:
        yield made


def test_a_batch_has_the_local_verdicts(graders: Graders) -> None:
    items = [(task, answer(n, task, text)) for n, (task, text) in enumerate(ANSWERS * 5)]
    book = Book(graders)
    for task, item in items:
        book.submit(task, item)
    with closing(Grader(Sandbox(workers=2), REWARD)) as local:
        expected = [local.submit(task, item).result() for task, item in items[: len(ANSWERS)]]
    for got, (_, item), want in zip(book.results(), items, expected * 5, strict=True):
        assert verdict(got) == verdict(replace(want, completion=item))
        assert got.completion is item
    programs = {stats.node: stats.programs for stats in graders.stats()}
    assert set(programs) == {"left", "right"}
    assert min(programs.values()) > 0
    assert sum(programs.values()) == len(items)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, stats.pid) for stats in graders.stats()} == {mine}, "the jails would starve"


def test_an_opening_is_graded_with_the_answer(graders: Graders) -> None:
    graded = graders.submit(STDIN, answer(0, STDIN, f"{INC}\n```"), "```python\n").result(timeout=30)
    assert graded.verdict.verdict == "AC"


def test_no_grader_has_more_than_its_bound(graders: Graders) -> None:
    book, seen = Book(graders), set[int]()
    for number in range(24):
        book.submit(STDIN, sleeper(number, 0.1))
    while not all(future.done() for future in book.futures):
        seen |= {stats.in_flight for stats in graders.stats()}
        time.sleep(0.01)
    assert graders.bound == 4
    assert max(seen) == graders.bound, "the others must wait here, and no worker may"
    assert {graded.verdict.verdict for graded in book.results()} == {"AC"}
    assert [stats.most for stats in graders.stats()] == [4, 4]


def test_a_node_that_dies_costs_no_program(
    graders: Graders, ready: Machines, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    dead = next(stats for stats in graders.stats() if stats.node == "right")
    before = sum(stats.programs for stats in graders.stats())
    book = Book(graders)
    for number in range(20):
        book.submit(STDIN, sleeper(number, 0.2))
    eventually(lambda: sum(future.done() for future in book.futures) >= 3)
    ready.kill("right")
    assert {graded.verdict.verdict for graded in book.results()} == {"AC"}
    assert sum(stats.programs for stats in graders.stats()) == before + 20
    assert any("on right is lost with" in line for line in said)
    eventually(lambda: not jails_of({dead.pid}))

    # Ray restarts the lost one as soon as a node has room for it.
    own_nsjail(ready.folder / "third-packages")
    ready.add("third", cpus=1, PYTHONPATH=packages(ready, "third"))
    eventually(lambda: {stats.node for stats in graders.stats() if stats.state == "up"} == {"left", "third"}, 40)
    book = Book(graders)
    for number in range(8):
        book.submit(STDIN, sleeper(number, 0))
    assert {graded.verdict.verdict for graded in book.results()} == {"AC"}
    assert all(stats.programs for stats in graders.stats() if stats.node == "third")
    assert capfd.readouterr() == ("", ""), "Ray talks on the console"


def end_jails(pid: int) -> None:
    """End every nsjail that this process started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = path.read_text().split("(", 1)[1].rsplit(")", 1)
            if name == "nsjail" and int(fields.split()[1]) == pid:
                os.kill(int(path.parent.name), 9)
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_a_program_fails_only_where_every_node_has(graders: Graders, ready: Machines) -> None:
    """Two programs, each fails on its first node and moves to the other's, of which one is mended by then."""
    before, lives = graders.infra_retries, [stats.restarts for stats in graders.stats()]
    for stats in graders.stats():
        break_nsjail(ready.folder / f"{stats.node}-packages")
        end_jails(stats.pid)
    futures = [graders.submit(STDIN, sleeper(number, 0)) for number in range(2)]
    # Three retries and a move for each.
    eventually(lambda: graders.infra_retries >= before + 8, 40)
    own_nsjail(ready.folder / "left-packages")
    wait(futures, timeout=40)
    [error] = [error for future in futures if (error := future.exception(timeout=0))]
    assert isinstance(error, SandboxError)
    assert re.search(r"task inc: no node could judge .* on left: .* has no namespaces.* on third: .*namesp", str(error))
    assert [future.result().verdict.verdict for future in futures if not future.exception()] == ["AC"]
    assert [stats.restarts for stats in graders.stats()] == lives


def test_close_leaves_nothing(graders: Graders) -> None:
    pids = {stats.pid for stats in graders.stats()}
    assert jails_of(pids)
    late = graders.submit(CALL, answer(0, CALL, "```python\nimport time\ntime.sleep(30)\n```"))
    eventually(lambda: any(stats.in_flight for stats in graders.stats()))
    graders.close()
    assert late.cancelled()
    assert not jails_of(pids)
    eventually(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")])


def test_a_node_without_a_required_protection_is_refused_by_name(ready: Machines) -> None:
    said: list[str] = []
    cluster = Cluster(address=ready.address, graders=2)
    with closing(Graders(cluster, Sandbox(workers=1), REWARD, said.append)) as made:  # third's nsjail is still broken
        assert {stats.node: stats.state for stats in made.stats()} == {"left": "up", "third": "refused"}
        assert [
            line for line in said if "on third is refused: protections that the recipe requires are missing" in line
        ]
        book = Book(made)
        for number in range(4):
            book.submit(STDIN, sleeper(number, 0))
        assert {graded.verdict.verdict for graded in book.results()} == {"AC"}
    own_nsjail(ready.folder / "third-packages")


def test_a_killed_driver_leaves_nothing(ready: Machines) -> None:
    script = f"""
import time
from engine.cluster.connect import joined
from engine.cluster.graders import Graders
from engine.recipe import Cluster, Reward, Sandbox
from tests.cluster.grading import STDIN, sleeper
cluster = Cluster(address={ready.address!r})
with joined(cluster):
    graders = Graders(cluster, Sandbox(workers=1), Reward(), print)
    future = graders.submit(STDIN, sleeper(0, 60))
    while not graders.stats()[0].in_flight:
        time.sleep(0.05)
    print(graders.stats()[0].pid, flush=True)
    future.result()
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        everything = {pid, *tree(pid)}
        assert len(everything) > 3
        assert jails_of({pid})
        driver.kill()
    eventually(lambda: not [pid for pid in everything if not is_zombie(pid)])
    eventually(lambda: not jails_of({pid}))


def test_no_grader_at_all_is_an_error_that_lists_the_nodes(ready: Machines) -> None:
    cluster = Cluster(address=ready.address, graders=2)
    with pytest.raises(
        RunError, match=r"no node can judge .*on \w+: the jails' interpreter /no/python.*on \w+: the jails"
    ):
        Graders(cluster, Sandbox(python="/no/python"), REWARD, print)
