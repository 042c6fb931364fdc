"""The gold filter in real jails: what it drops, why, and that it goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from engine.tasks import read_tasks
from engine.tasks.curate import gold_file, show_lines
from engine.tasks.formats import FORMATS
from engine.tasks.gold import Judged, gold_filter, reason_of
from engine.tasks.own import write_own
from engine.types import Task
from sandbox import AssertTests, CallCase, CallTests, Limits, Pool, SandboxError, StdinCase, StdinTests, Verdict

DATA = Path(__file__).resolve().parents[1] / "data"
ADD = StdinTests((StdinCase("1 2\n", "3\n"), StdinCase("4 4\n", "8\n")))
GOOD = "print(sum(map(int, input().split())))\n"

PLANTED: dict[str, tuple[str | None, StdinTests | CallTests | AssertTests]] = {
    "no reference": (None, ADD),
    "syntax error": ("print(1\n", ADD),
    "Python 2": ("a, b = map(int, raw_input().split())\nprint a + b\n", ADD),
    "wrong answer": ("print(3)\n", ADD),
    "timeout": ("while True:\n    pass\n", ADD),
    "memory": ("x = bytearray(1 << 30)\nx[::4096] = b'1' * len(x[::4096])\n", ADD),
    "too much output": ("print('x' * (1 << 22))\n", ADD),
    "runtime error": ("print(1 // 0)\n", ADD),
    "missing module": ("import numpy\n" + GOOD, ADD),
    "broken tests": ("def f(x):\n    return x\n", AssertTests("f", "import nowhere\nassert f(1) == 1\n")),
    "not deterministic": ("import os\nprint(os.urandom(8).hex())\n", StdinTests((StdinCase("", "?\n"),))),
}


def planted() -> list[Task]:
    """Good tasks with a bad one behind each."""
    tasks = []
    for number, (reason, (reference, tests)) in enumerate(PLANTED.items()):
        tasks.append(Task(f"good/{number}", "Add.", ADD, reference=GOOD, source="s"))
        tasks.append(Task(f"bad/{reason}", "Add.", tests, reference=reference, source="s"))
    return tasks


LIMITS = Limits(cpu_seconds=1.0, memory_mb=128)


def test_a_set_with_planted_bad_rows_loses_exactly_those(tmp_path: Path) -> None:
    tasks = [task for task in planted() if task.id != "bad/not deterministic"]
    write_own(tmp_path / "in.jsonl", tasks)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"id": "cut\n')
    done: list[tuple[int, int]] = []
    out = tmp_path / "out.jsonl"
    summary = gold_file(
        f"file:{tmp_path / 'in.jsonl'}", out, jobs=2, limits=LIMITS, progress=lambda n, of: done.append((n, of))
    )
    kept = read_tasks(f"file:{out}").tasks
    assert [task.id for task in kept] == [f"good/{n}" for n in range(len(PLANTED))]
    assert kept == tuple(task for task in tasks if task.id.startswith("good/"))
    assert summary.dropped == {reason: 1 for reason in PLANTED if reason != "not deterministic"}
    assert summary.rejected == {"not JSON": 1}
    assert summary.lines()[-1] == f"gold: {len(kept)} of {len(tasks)} references pass every case twice"
    assert done[0] == (0, len(tasks))
    assert done[-1] == (len(tasks), len(tasks))
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert {row["id"]: row["reason"] for row in manifest["dropped_tasks"]} == {
        f"bad/{reason}": reason for reason in summary.dropped
    }
    assert manifest["rejected_rows"][0]["reason"] == "not JSON"
    assert manifest["limits"]["cpu_seconds"] == 1.0
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "out.jsonl.manifest.json"}


def test_a_reference_that_passes_once_is_not_enough() -> None:
    class Fickle(Pool):
        """A pool that answers AC and then WA."""

        said = 0

        async def __aenter__(self) -> Fickle:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def grade(self, program: str, *_: Any, **__: Any) -> Verdict:
            self.said += 1
            return Verdict("AC" if self.said % 2 else "WA", 1, 1)

    gold = gold_filter([Task("t", "p", ADD, reference=GOOD)], Fickle(1), LIMITS)
    assert [said.reason for said in gold.judged] == ["not deterministic"]


class Counting(Pool):
    """A pool that fails as a machine does after some gradings."""

    graded = 0
    fails_after = 10**9

    async def grade(self, *args: Any, **named: Any) -> Verdict:
        if self.graded >= self.fails_after:
            raise SandboxError("no more jails")
        self.graded += 1
        return await super().grade(*args, **named)


def test_a_machine_that_fails_drops_no_task_and_the_journal_goes_on(tmp_path: Path) -> None:
    tasks = [Task(f"t/{n}", "Add.", ADD, reference=GOOD if n % 3 else "print(0)") for n in range(12)]
    journal = tmp_path / "j.jsonl"
    first = Counting(1)
    first.fails_after = 9
    with pytest.raises(SandboxError, match="no more jails"):
        gold_filter(tasks, first, LIMITS, journal=journal)
    lines = journal.read_text().splitlines()
    assert 3 <= len(lines) <= 8
    journal.write_text("\n".join(lines) + '\n{"sha256": "cut')  # killed while it wrote
    second = Counting(1)
    gold = gold_filter(tasks, second, LIMITS, journal=journal)
    straight = Counting(1)
    assert gold == gold_filter(tasks, straight, LIMITS)
    assert second.graded < straight.graded
    assert gold.judged[0] == Judged("t/0", "wrong answer", gold.judged[0].detail)
    third = Counting(1)
    assert gold_filter(tasks, third, LIMITS, journal=journal) == gold
    assert third.graded == 0


def test_a_journal_is_of_the_very_tasks_and_limits(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    task = Task("t", "Add.", ADD, reference=GOOD)
    gold_filter([task], Counting(1), LIMITS, journal=journal)
    changed = Counting(1)
    gold = gold_filter([Task("t", "Add.", ADD, reference="print(3)")], changed, LIMITS, journal=journal)
    assert [said.reason for said in gold.judged] == ["wrong answer"]
    assert changed.graded == 1
    for pool, limits in ((Counting(1), Limits(cpu_seconds=9)), (Counting(1, numpy=True), LIMITS)):
        with pytest.raises(InputError, match="other settings"):
            gold_filter([task], pool, limits, journal=journal)
    journal.write_text("")
    assert gold_filter([task], Counting(1), LIMITS, journal=journal).kept == (task,)


def test_results_that_were_unwrapped_by_mistake_are_wrapped_again() -> None:
    calls = CallTests("wrap", (CallCase((4,), 4), CallCase((5,), 5)))
    task = Task("t", "Wrap it.", calls, reference="def wrap(n):\n    return [n]\n")
    gold = gold_filter([task], Pool(1), LIMITS)
    assert gold.kept[0].tests == CallTests("wrap", (CallCase((4,), [4]), CallCase((5,), [5])))
    assert gold.judged == (Judged("t", wrapped=True),)


@pytest.mark.parametrize(
    ("verdict", "program", "reason"),
    [
        (Verdict("CE", 0, 1), "print 'x'", "Python 2"),
        (Verdict("CE", 0, 1), "try:\n    pass\nexcept ValueError, e:\n    pass", "Python 2"),
        (Verdict("CE", 0, 1), "def f(:", "syntax error"),
        (Verdict("RE", 0, 1, detail="NameError: name 'xrange' is not defined"), "xrange(3)", "Python 2"),
        (Verdict("RE", 0, 1, detail="NameError: name 'x' is not defined"), "x", "runtime error"),
        (Verdict("INFRA", 0, 0), "x", "broken tests"),
    ],
)
def test_a_failure_has_a_reason_that_can_be_counted(verdict: Verdict, program: str, reason: str) -> None:
    assert reason_of(verdict, program) == reason


def test_the_references_of_every_sample_pass(tmp_path: Path) -> None:
    tasks = [task for kind in FORMATS for task in read_tasks(f"file:{DATA / kind}.jsonl?format={kind}").tasks]
    gold = gold_filter([task for task in tasks if task.reference is not None], Pool(2), Limits())
    assert {said.id: said.reason for said in gold.judged if said.reason} == {"verifiable/vfc_7": "Python 2"}
    assert [said.id for said in gold.judged if said.wrapped] == ["apps/8"]
    assert not any(said.soft for said in gold.judged)
    write_own(tmp_path / "all.jsonl", gold.kept)
    assert read_tasks(f"file:{tmp_path / 'all.jsonl'}").tasks == gold.kept


@pytest.mark.slow
def test_humaneval_passes_whole() -> None:
    summary = gold_file("humaneval", None, limits=Limits(cpu_seconds=10))
    assert summary.lines()[-1] == "gold: 164 of 164 references pass every case twice"


def test_a_source_is_shown_in_words() -> None:
    lines = show_lines(f"file:{DATA / 'apps.jsonl'}?format=apps", count=9)
    assert "5 tasks, 4 rows rejected" in lines[0]
    text = "\n".join(lines)
    assert "no cases (first: row 5 (4))" in text
    assert "Sort the words" in text
    assert max(map(len, lines)) < 2100
    assert "call/3" in "\n".join(show_lines(f"file:{DATA / 'rlvr.jsonl'}", count=9))
