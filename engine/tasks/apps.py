"""APPS and TACO: a question, solutions as JSON, and inputs and outputs as JSON.

Format of `codeparrot/apps` (problem_id, question, solutions, input_output, difficulty, url, starter_code) and
`BAAI/TACO` (the same without problem_id, with name, source, time_limit, memory_limit). `input_output` is an object of
two lists, inputs and outputs, and `fn_name` where a function is called; it is empty where a problem has no cases, and
its integers may have thousands of digits. DeepCoder's taco rows hold the same object in `tests`.
"""

from __future__ import annotations

from typing import Any

from engine.tasks.cases import Reading, call_tests, limits_of, listed_calls, paired, stdin_tests
from engine.tasks.prompt import call_prompt, stdin_prompt
from engine.tasks.row import BadRow, Row, fingerprint, mapping, optional_text, reference, sequence, stratum, text
from engine.types import Task
from sandbox import Tests


def read_apps(row: Row, how: Reading) -> Task:
    """An APPS row as a task. Raises BadRow."""
    return _read(row, how, "apps")


def read_taco(row: Row, how: Reading) -> Task:
    """A TACO row as a task. Raises BadRow."""
    return _read(row, how, "taco")


def _read(row: Row, how: Reading, kind: str) -> Task:
    question = text(row, "question")
    given = row.get("problem_id")
    name = f"{kind}/{given if isinstance(given, (int, str)) and given != '' else fingerprint(question)}"
    tests, entry_point = listed_tests(mapping(row.get("input_output"), "input_output"), question, name, how)
    starter, style = optional_text(row, "starter_code"), how.prompt or "instruct"
    prompt = call_prompt(question, starter, entry_point, style) if entry_point else stdin_prompt(question, style)
    return Task(
        id=name,
        prompt=prompt,
        tests=tests,
        reference=reference(row.get("solutions")),
        source=stratum(kind, row.get("source"), row.get("difficulty")),
        limits=limits_of(row.get("time_limit"), row.get("memory_limit")),
    )


def listed_tests(found: dict[str, Any], statement: str, name: str, how: Reading) -> tuple[Tests, str]:
    """Tests from an object of inputs, outputs and perhaps fn_name; and the function's name. Raises BadRow."""
    inputs, outputs = sequence(found.get("inputs"), "inputs"), sequence(found.get("outputs"), "outputs")
    if not inputs and not outputs:
        raise BadRow("no cases")
    entry_point = found.get("fn_name") or ""
    if not isinstance(entry_point, str):
        raise BadRow("no entry point", "fn_name must be text")
    if not entry_point:
        return stdin_tests(paired(inputs, outputs), statement, name, how), ""
    return call_tests(entry_point, listed_calls(inputs, outputs), statement, name, how), entry_point
