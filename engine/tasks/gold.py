"""The gold filter: a task is kept if its reference passes every case, twice, in the jails that training has.

What a reference does wrong has a reason out of few, so that they can be counted. A machine that fails is never a
reason: the pool tries again, and then the filter stops with SandboxError. Every judgement is written to a journal
before the next one counts, so a filter that was killed goes on where it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from engine.errors import InputError
from engine.tasks.own import row_of
from engine.types import Task
from sandbox import CallCase, CallTests, Limits, Pool, Verdict

Progress = Callable[[int, int], None]
"""Called with how many are done and how many there are."""

REASONS: Mapping[str, str] = {
    "WA": "wrong answer",
    "TLE": "timeout",
    "MLE": "memory",
    "OLE": "too much output",
    "RE": "runtime error",
    "CE": "syntax error",
    "NO_CODE": "no reference",
    "INFRA": "broken tests",
}
_PRINTS = re.compile(r"^[ \t]*(?:print(?=[ \t]+[^(\s=.,])|print(?=[ \t]*>>)|exec[ \t]+[^(\s=])", re.MULTILINE)
_EXCEPTS = re.compile(r"^[ \t]*except[ \t]+[\w.]+[ \t]*,[ \t]*\w+[ \t]*:|<>|\b\d+L\b", re.MULTILINE)
_NAMES = re.compile(r"name '(?:raw_input|xrange|unicode|long|basestring|unichr|reduce|cmp)' is not defined")
_WINDOW = 2  # tasks in flight for each worker


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a task's reference. No reason: it passed twice."""

    id: str
    reason: str = ""
    detail: str = ""
    wrapped: bool = False
    """It passes when each result is a list of one: the reader had taken the list for packing."""
    soft: bool = False
    """Tests and program share an interpreter: a program could forge this task's verdict."""


@dataclass(frozen=True, slots=True)
class Gold:
    """The tasks that are kept, in order, and what was said of every task."""

    kept: tuple[Task, ...]
    judged: tuple[Judged, ...]


def gold_filter(
    tasks: Sequence[Task],
    pool: Pool,
    limits: Limits,
    *,
    journal: Path | None = None,
    progress: Progress | None = None,
) -> Gold:
    """Run every task's reference twice; `limits` are those of tasks that have none of their own.

    The pool must not be open yet. journal: read first, then added to. Raises SandboxError when the machine can't run
    jails, and InputError for a journal that was made with other settings.
    """
    names = [_hash(task) for task in tasks]
    known = _read_journal(journal, pool, limits) if journal is not None else {}
    done = {i: known[name] for i, name in enumerate(names) if name in known}
    left = [i for i in range(len(tasks)) if i not in done]
    with _journal(journal, pool, limits) as file:

        def note(index: int, judged: Judged) -> None:
            done[index] = judged
            if file is not None:
                file.write(json.dumps({"sha256": names[index], **dataclasses.asdict(judged)}) + "\n")
                file.flush()
            if progress is not None:
                progress(len(done), len(tasks))

        if progress is not None:
            progress(len(done), len(tasks))
        if left:
            asyncio.run(_judge_all(tasks, left, pool, limits, note))
    judged = tuple(done[i] for i in range(len(tasks)))
    kept = (
        wrapped(task) if said.wrapped else task for task, said in zip(tasks, judged, strict=True) if not said.reason
    )
    return Gold(tuple(kept), judged)


async def judge(task: Task, pool: Pool, limits: Limits) -> Judged:
    """What a task's reference comes to. Raises SandboxError."""
    program = task.reference
    if program is None or not program.strip():
        return Judged(task.id, "no reference")
    allowed = task.limits or limits
    verdict = await pool.grade(program, task.tests, allowed)
    changed = False
    if verdict.verdict == "WA" and isinstance(task.tests, CallTests):
        other = wrapped(task)
        again = await pool.grade(program, other.tests, allowed)
        if again.verdict == "AC":
            task, verdict, changed = other, again, True
    if verdict.verdict != "AC":
        return Judged(task.id, reason_of(verdict, program), verdict.detail, soft=verdict.soft)
    again = await pool.grade(program, task.tests, allowed)
    if again.verdict != "AC":
        return Judged(task.id, "not deterministic", again.detail, soft=again.soft)
    return Judged(task.id, wrapped=changed, soft=verdict.soft)


def reason_of(verdict: Verdict, program: str) -> str:
    """Why a reference is not kept, in a few words that can be counted."""
    old = verdict.verdict == "CE" and (_PRINTS.search(program) or _EXCEPTS.search(program))
    if old or (verdict.verdict == "RE" and _NAMES.search(verdict.detail)):
        return "Python 2"
    if verdict.verdict == "RE" and "ModuleNotFoundError" in verdict.detail:
        return "missing module"
    return REASONS[verdict.verdict]


def wrapped(task: Task) -> Task:
    """The task whose calls' results are lists of one. Raises TypeError where the tests aren't calls."""
    if not isinstance(task.tests, CallTests):
        raise TypeError("only results of calls can be wrapped")
    cases = tuple(CallCase(case.args, [case.result]) for case in task.tests.cases)
    return replace(task, tests=replace(task.tests, cases=cases))


async def _judge_all(
    tasks: Sequence[Task], left: Sequence[int], pool: Pool, limits: Limits, note: Callable[[int, Judged], None]
) -> None:
    waiting = iter(left)

    async def work() -> None:
        for index in waiting:  # shared: each takes the next one that nobody has
            note(index, await judge(tasks[index], pool, limits))

    async with pool:
        workers = [asyncio.create_task(work()) for _ in range(_WINDOW * pool.workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def _hash(task: Task) -> str:
    """A task by all that it is: an entry of the journal is of this very task."""
    try:
        row: Any = row_of(task)
    except (ValueError, TypeError):  # tests that aren't plain data; the pool will say so
        row = repr((task.id, task.reference))
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _header(pool: Pool, limits: Limits) -> dict[str, Any]:
    return {"gold": 1, "numpy": pool.numpy, "limits": dataclasses.asdict(limits)}


def _read_journal(path: Path, pool: Pool, limits: Limits) -> dict[str, Judged]:
    """Judgements by the hash of their task. A line that was cut off is passed over."""
    if not path.is_file():
        return {}
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    if not rows or "gold" not in rows[0]:
        path.unlink()  # killed before it said what it is
        return {}
    if rows[0] != _header(pool, limits):
        raise InputError(f"{path} is the journal of a gold filter with other settings; delete it, or write elsewhere")
    return {row.pop("sha256"): Judged(**row) for row in rows[1:]}


@contextmanager
def _journal(path: Path | None, pool: Pool, limits: Limits) -> Iterator[TextIO | None]:
    """The journal, opened to be added to; None where there is to be none."""
    if path is None:
        yield None
        return
    old = path.read_bytes() if path.is_file() else b""
    with path.open("a", encoding="utf-8") as file:
        if not old:
            file.write(json.dumps(_header(pool, limits)) + "\n")
        elif not old.endswith(b"\n"):
            file.write("\n")
        file.flush()
        yield file
