"""`rlvr grade`: completions from a JSON Lines file, verdicts to another, in the same order. Needs no torch."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from engine.reward.extract import extract_program
from sandbox import (
    AssertTests,
    CallCase,
    CallTests,
    Limits,
    Pool,
    StdinCase,
    StdinTests,
    Tests,
    Verdict,
)

WINDOW = 4  # lines read ahead for each job


class MalformedLine(ValueError):
    """A line that says nothing that could be graded; the reason."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line: a program, or None with the reason why the completion has none, and what it is judged by."""

    id: object
    program: str | None
    reason: str
    tests: Tests
    limits: Limits


@dataclass(slots=True)
class Summary:
    """What a file came to: lines, and how many of each verdict."""

    lines: int = 0
    verdicts: collections.Counter[str] = field(default_factory=collections.Counter)
    soft: int = 0


def grade_file(
    path: Path | str,
    out: Path | str | None = None,
    jobs: int | None = None,
    *,
    python: str = "/usr/bin/python3",
    numpy: bool = False,
    require: tuple[str, ...] = (),
    stop_at_first_failure: bool = True,
) -> Summary:
    """Grade every line of `path`; write a line for each to `out`, or to stdout.

    jobs: programs at once; None takes every core that this process may use. A malformed line gives an INFRA line
    with the reason, and the others go on. Blank lines are passed over.
    Raises SandboxError when this machine cannot run jails, OSError for files that cannot be read or written.
    """
    workers = jobs or len(os.sched_getaffinity(0))
    pool = Pool(workers, python=python, numpy=numpy, require=require)
    with open(path, encoding="utf-8", errors="surrogateescape") as lines, _output(out) as sink:
        return asyncio.run(_grade_lines(pool, lines, sink, stop_at_first_failure))


@contextmanager
def _output(out: Path | str | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    with open(out, "w", encoding="utf-8") as sink:
        yield sink


async def _grade_lines(pool: Pool, lines: TextIO, sink: TextIO, stop: bool) -> Summary:
    summary = Summary()
    waiting: collections.deque[asyncio.Task[dict[str, Any]]] = collections.deque()

    async def write_oldest() -> None:
        row = await waiting.popleft()
        summary.lines += 1
        summary.verdicts[row["verdict"]] += 1
        summary.soft += row["soft"]
        sink.write(json.dumps(row) + "\n")
        sink.flush()

    async with pool:
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                waiting.append(asyncio.create_task(grade_line(line, number, pool.grade, stop)))
                if len(waiting) >= WINDOW * pool.workers:
                    await write_oldest()
            while waiting:
                await write_oldest()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    return summary


async def grade_line(line: str, number: int, grade: Callable[..., Awaitable[Verdict]], stop: bool) -> dict[str, Any]:
    """The line out for one line in. Raises SandboxError."""
    given: object = None
    try:
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MalformedLine(f"not JSON: {error}") from None
        item = parse_item(given)
    except MalformedLine as error:
        name = given.get("id") if isinstance(given, dict) else None
        return row_of(name, Verdict("INFRA", 0, 0, detail=f"line {number}: {error}"))
    if item.program is None:
        total = 1 if isinstance(item.tests, AssertTests) else len(item.tests.cases)
        return row_of(item.id, Verdict("NO_CODE", 0, total, detail=item.reason))
    return row_of(item.id, await grade(item.program, item.tests, item.limits, stop_at_first_failure=stop))


def row_of(name: object, verdict: Verdict) -> dict[str, Any]:
    """A verdict as the dict of a line out."""
    return {
        "id": name,
        "verdict": verdict.verdict,
        "passed": verdict.passed,
        "total": verdict.total,
        "cases": [
            {"verdict": case.verdict, "cpu_seconds": case.cpu_seconds, "wall_seconds": case.wall_seconds}
            for case in verdict.cases
        ],
        "detail": verdict.detail,
        "soft": verdict.soft,
    }


def parse_item(given: object) -> Item:
    """A line's JSON as an item. Raises MalformedLine."""
    line = _object(given, "the line", {"id", "completion", "program", "tests", "limits"})
    if ("completion" in line) == ("program" in line):
        raise MalformedLine("exactly one of completion and program is needed")
    tests = parse_tests(line.get("tests"))
    limits = parse_limits(line.get("limits", {}))
    if "program" in line:
        return Item(line.get("id"), _text(line["program"], "program"), "", tests, limits)
    found = extract_program(_text(line["completion"], "completion"))
    return Item(line.get("id"), found.program, found.reason, tests, limits)


def parse_tests(given: object) -> Tests:
    """The `tests` of a line. Raises MalformedLine."""
    kind = given.get("kind") if isinstance(given, dict) else None
    if kind == "stdin":
        tests = _object(given, "tests", {"kind", "cases", "compare", "checker"})
        compare = tests.get("compare", "lines")
        if compare not in ("lines", "tokens", "exact"):
            raise MalformedLine(f"tests.compare must be lines, tokens or exact, not {compare!r}")
        checker = None if tests.get("checker") is None else _text(tests["checker"], "tests.checker")
        return StdinTests(tuple(map(_stdin_case, _list(tests.get("cases"), "tests.cases"))), compare, checker)
    if kind == "call":
        tests = _object(given, "tests", {"kind", "entry_point", "cases"})
        cases = tuple(map(_call_case, _list(tests.get("cases"), "tests.cases")))
        return CallTests(_text(tests.get("entry_point"), "tests.entry_point"), cases)
    if kind == "assert":
        tests = _object(given, "tests", {"kind", "entry_point", "code"})
        return AssertTests(_text(tests.get("entry_point"), "tests.entry_point"), _text(tests.get("code"), "tests.code"))
    raise MalformedLine(f"tests.kind must be stdin, call or assert, not {kind!r}")


def _stdin_case(given: object) -> StdinCase:
    case = _object(given, "a case", {"input", "output", "accepted"})
    accepted = tuple(_text(text, "accepted") for text in _list(case.get("accepted", []), "accepted"))
    return StdinCase(_text(case.get("input"), "input"), _text(case.get("output"), "output"), accepted)


def _call_case(given: object) -> CallCase:
    case = _object(given, "a case", {"args", "result"})
    if "result" not in case:
        raise MalformedLine("a case has no result")
    return CallCase(tuple(_list(case.get("args"), "args")), case["result"])


def parse_limits(given: object) -> Limits:
    """The `limits` of a line; those not given are the defaults. Raises MalformedLine."""
    limits = _object(given, "limits", {limit.name for limit in dataclasses.fields(Limits)})
    for name, value in limits.items():
        whole = name not in ("cpu_seconds", "wall_seconds", "program_cpu_seconds")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
            raise MalformedLine(f"limits.{name} must be a positive {'whole ' if whole else ''}number, not {value!r}")
    return Limits(**limits)


def _object(given: object, what: str, keys: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise MalformedLine(f"{what} must be an object")
    unknown = sorted(set(given) - keys)
    if unknown:
        raise MalformedLine(f"{what} has the unknown key {unknown[0]!r}; known: {', '.join(sorted(keys))}")
    return given


def _list(given: object, what: str) -> list[Any]:
    if not isinstance(given, list):
        raise MalformedLine(f"{what} must be a list")
    return given


def _text(given: object, what: str) -> str:
    if not isinstance(given, str):
        raise MalformedLine(f"{what} must be text")
    return given
