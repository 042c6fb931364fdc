"""DeepCoder-Preview: four configurations, told apart by the shape of `tests`.

Format of `agentica-org/DeepCoder-Preview-Dataset`: problem, solutions, tests (JSON), starter_code, metadata.
primeintellect, codeforces: a list of {input, output, type or testtype, fn_name}. lcbv5: the same with testtype `stdin`
or `functional`; a functional input has a JSON value a line, and metadata.func_name is the function. taco: an object
of inputs, outputs and fn_name, which is kept here: without it a task that calls a function can't be solved.
"""

from __future__ import annotations

from engine.tasks.apps import listed_tests
from engine.tasks.cases import Reading, call_tests, limits_of, line_calls
from engine.tasks.prompt import call_prompt, stdin_prompt
from engine.tasks.row import (
    BadRow,
    Row,
    embedded,
    fingerprint,
    identity,
    mapping,
    optional_text,
    reference,
    stratum,
    text,
)
from engine.tasks.verifiable import typed_tests
from engine.types import Task
from sandbox import Tests


def read_deepcoder(row: Row, how: Reading) -> Task:
    """A row of any configuration as a task. Raises BadRow."""
    problem = text(row, "problem")
    metadata = mapping(row.get("metadata"), "metadata")
    name = _name(row, problem, how)
    tests, entry_point = _tests(row, metadata, problem, name, how)
    starter, style = optional_text(row, "starter_code"), how.prompt or "livecodebench"
    prompt = call_prompt(problem, starter, entry_point, style) if entry_point else stdin_prompt(problem, style)
    return Task(
        id=name,
        prompt=prompt,
        tests=tests,
        reference=reference(row.get("solutions")),
        source=stratum("deepcoder", how.label or row.get("data_source"), metadata.get("difficulty")),
        limits=limits_of(metadata.get("time_limit") or row.get("time_limit")),
    )


def _name(row: Row, problem: str, how: Reading) -> str:
    try:
        given = identity(row, "uid", "problem_id")
    except BadRow:
        given = fingerprint(problem)
    return f"deepcoder/{how.label}/{given}" if how.label else f"deepcoder/{given}"


def _tests(row: Row, metadata: dict[str, object], problem: str, name: str, how: Reading) -> tuple[Tests, str]:
    found = embedded(row.get("tests"), "tests")
    if isinstance(found, dict):
        return listed_tests(found, problem, name, how)
    if not isinstance(found, list):
        raise BadRow("no cases" if not found else "a field cannot be read", "tests must be a list or an object")
    types = {case.get("testtype") for case in found if isinstance(case, dict)}
    if "functional" not in types:
        return typed_tests(found, problem, name, how)
    if types != {"functional"} or not all(isinstance(case, dict) for case in found):
        raise BadRow("cases of an unknown type", "functional and others")
    entry_point = metadata.get("func_name") or next((f for f in map(_function, found) if f), "")
    if not isinstance(entry_point, str) or not entry_point:
        raise BadRow("no entry point", "neither metadata nor a case has func_name")
    calls = line_calls([(case.get("input"), case.get("output")) for case in found])
    return call_tests(entry_point, calls, problem, name, how), entry_point


def _function(case: dict[str, object]) -> str:
    inner = case.get("metadata")
    found = case.get("fn_name") or (inner.get("func_name") if isinstance(inner, dict) else None)
    return found if isinstance(found, str) else ""
