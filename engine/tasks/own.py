"""rlvr's own rows: a task as one line of JSON, and back without loss.

    {"id": "sum/1",                       any text; no two lines of a file may have the same
     "prompt": "Add two numbers. ...",    text, or chat messages [{"role": "user", "content": "..."}]
     "tests": {...},                      one of the three kinds below
     "reference": "print(...)",           optional: a program that passes
     "starter": "def f(",                 optional: the prompt's end, which the completion goes on from
     "source": "sums/easy",               optional: data set, origin and difficulty, by which results are told apart
     "limits": {"cpu_seconds": 4}}        optional: fields of sandbox.Limits; the recipe's where it is left out

    {"kind": "stdin", "cases": [{"input": "1 2\n", "output": "3\n", "accepted": ["3.0\n"]}],
     "compare": "lines", "checker": null}
    {"kind": "call", "entry_point": "f", "cases": [{"args": [1, 2], "result": 3}]}
    {"kind": "assert", "entry_point": "f", "code": "assert f(1, 2) == 3"}

`tests` is what `rlvr grade` reads, with one addition: `"values": "tagged"` beside a call's cases says that args and
results are in the tagged JSON of `sandbox.plain`, for what JSON lacks: tuples, sets, bytes, dict keys other than
text, integers beyond 2^60.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from engine.tasks.cases import Reading
from engine.tasks.row import BadRow, Row
from engine.types import Task
from sandbox import AssertTests, CallCase, CallTests, Limits, StdinCase, StdinTests, Tests, plain
from sandbox.types import Compare

_KEYS = {"id", "prompt", "tests", "reference", "starter", "source", "limits"}
_EXACT = 1 << 60


def read_own(row: Row, how: Reading) -> Task:
    """One of our own rows as a task, exactly as it stands. Raises BadRow."""
    found = _object(dict(row), "the row", _KEYS)
    prompt = found.get("prompt")
    if isinstance(prompt, list):
        messages = [_object(message, "a message", {"role", "content"}) for message in prompt]
        if not messages or not all(isinstance(m.get(k), str) for m in messages for k in ("role", "content")):
            raise BadRow("a field cannot be read", "a message must have role and content")
        prompt = tuple(messages)
    elif not isinstance(prompt, str) or not prompt:
        raise BadRow("a field is missing", "prompt must be text or messages")
    return Task(
        id=_text(found, "id"),
        prompt=prompt,
        tests=tests_of(found.get("tests")),
        starter=_text(found, "starter", ""),
        reference=None if found.get("reference") is None else _text(found, "reference"),
        source=_text(found, "source", ""),
        limits=None if found.get("limits") is None else _limits(found["limits"]),
    )


def tests_of(given: object) -> Tests:
    """The `tests` of a row. Raises BadRow."""
    kind = given.get("kind") if isinstance(given, dict) else None
    if kind == "stdin":
        tests = _object(given, "tests", {"kind", "cases", "compare", "checker"})
        compare = tests.get("compare", "lines")
        if compare not in get_args(Compare):
            raise BadRow("a field cannot be read", f"compare must be one of {', '.join(get_args(Compare))}")
        checker = None if tests.get("checker") is None else _text(tests, "checker")
        return StdinTests(tuple(_stdin_case(case) for case in _cases(tests)), compare, checker)
    if kind == "call":
        tests = _object(given, "tests", {"kind", "entry_point", "cases", "values"})
        tagged = tests.get("values", "json")
        if tagged not in ("json", "tagged"):
            raise BadRow("a field cannot be read", "values must be json or tagged")
        return CallTests(_text(tests, "entry_point"), tuple(_call_case(c, tagged == "tagged") for c in _cases(tests)))
    if kind == "assert":
        tests = _object(given, "tests", {"kind", "entry_point", "code"})
        code = _text(tests, "code")
        if not code.strip():
            raise BadRow("no cases")
        return AssertTests(_text(tests, "entry_point"), code)
    raise BadRow("a field cannot be read", "tests.kind must be stdin, call or assert")


def row_of(task: Task) -> dict[str, Any]:
    """A task as one of our own rows; `read_own` gives it back. Raises ValueError for tests that aren't plain data."""
    row: dict[str, Any] = {"id": task.id, "prompt": task.prompt if isinstance(task.prompt, str) else list(task.prompt)}
    row["tests"] = _tests_row(task.tests)
    row |= {key: value for key in ("starter", "source") if (value := getattr(task, key))}
    if task.reference is not None:
        row["reference"] = task.reference
    if task.limits is not None:
        row["limits"] = {key: value for key, value in dataclasses.asdict(task.limits).items() if value is not None}
    return row


def write_own(path: Path, tasks: Iterable[Task]) -> None:
    """Write tasks as a JSONL file of our own rows, whole or not at all. Raises OSError."""
    aside = path.with_name(f".{path.name}.part")
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        for task in tasks:
            file.write(json.dumps(row_of(task)) + "\n")
    aside.replace(path)


def _tests_row(tests: Tests) -> dict[str, Any]:
    if isinstance(tests, AssertTests):
        return {"kind": "assert", "entry_point": tests.entry_point, "code": tests.code}
    if isinstance(tests, StdinTests):
        cases = [
            {"input": case.input, "output": case.output} | ({"accepted": list(case.accepted)} if case.accepted else {})
            for case in tests.cases
        ]
        row: dict[str, Any] = {"kind": "stdin", "cases": cases, "compare": tests.compare}
        return row | ({"checker": tests.checker} if tests.checker is not None else {})
    row = {"kind": "call", "entry_point": tests.entry_point}
    if all(_is_json([list(case.args), case.result]) for case in tests.cases):
        return row | {"cases": [{"args": list(case.args), "result": case.result} for case in tests.cases]}
    cases = [{"args": _tagged(list(case.args)), "result": _tagged(case.result)} for case in tests.cases]
    return row | {"cases": cases, "values": "tagged"}


def _tagged(value: object) -> Any:
    return _in_order(json.loads(plain.encode(value)))


def _in_order(value: Any) -> Any:
    """Tagged JSON with the items of sets in one order, so that equal tasks have equal rows and hashes."""
    if isinstance(value, list):
        return [_in_order(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = value.items()
    items = _in_order(inner)
    return {tag: sorted(items, key=json.dumps) if tag in ("s", "f") else items}


def _is_json(value: object) -> bool:
    """Whether JSON gives the value back as it was."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if type(value) is int:
        return -_EXACT < value < _EXACT
    return value is None or type(value) in (bool, str) or (type(value) is float and math.isfinite(value))


def _stdin_case(given: object) -> StdinCase:
    case = _object(given, "a case", {"input", "output", "accepted"})
    accepted = case.get("accepted", [])
    if not isinstance(accepted, list) or not all(isinstance(text, str) for text in accepted):
        raise BadRow("a field cannot be read", "accepted must be a list of texts")
    return StdinCase(_text(case, "input"), _text(case, "output"), tuple(accepted))


def _call_case(given: object, tagged: bool) -> CallCase:
    case = _object(given, "a case", {"args", "result"})
    if "args" not in case or "result" not in case:
        raise BadRow("a field is missing", "a call needs args and result")
    args, result = case["args"], case["result"]
    if tagged:
        try:
            args, result = plain.decode(json.dumps(args).encode()), plain.decode(json.dumps(result).encode())
        except plain.NotPlain as error:
            raise BadRow("a field cannot be read", str(error)) from None
    if not isinstance(args, list):
        raise BadRow("a field cannot be read", "args must be a list")
    return CallCase(tuple(args), result)


def _cases(tests: dict[str, Any]) -> list[Any]:
    cases = tests.get("cases")
    if not isinstance(cases, list):
        raise BadRow("a field is missing", "tests.cases must be a list")
    if not cases:
        raise BadRow("no cases")
    return cases


def _limits(given: object) -> Limits:
    limits = _object(given, "limits", {limit.name for limit in dataclasses.fields(Limits)})
    for name, value in limits.items():
        whole = name not in ("cpu_seconds", "wall_seconds", "program_cpu_seconds")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
            raise BadRow("a field cannot be read", f"limits.{name} must be a positive {'whole ' * whole}number")
    return Limits(**limits)


def _object(given: object, what: str, keys: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadRow("a field cannot be read", f"{what} must be an object")
    unknown = sorted(set(given) - keys)
    if unknown:
        raise BadRow("an unknown key", f"{what} has {unknown[0]!r}; known: {', '.join(sorted(keys))}")
    return given


def _text(row: dict[str, Any], key: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str) or (not value and default is None and key in ("id", "entry_point")):
        raise BadRow("a field is missing", f"{key} must be text")
    return value
