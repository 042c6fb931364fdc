"""open-r1's verifiable coding problems: a statement, a solution, and typed cases.

Format of `open-r1/verifiable-coding-problems-python`: problem_statement, gold_standard_solution, problem_id, source,
metadata {difficulty, memory_limit, time_limit}, verification_info {language, test_cases [{fn_name, input, output,
type}]}. `PrimeIntellect/verifiable-coding-problems`, from which it was made, has `prompt` for the statement and the
two nested fields as text of a Python dict. A `function_call` has a list of arguments as its input.
"""

from __future__ import annotations

from typing import Any

from engine.tasks.cases import Pair, Reading, call_tests, limits_of, listed_calls, stdin_tests
from engine.tasks.prompt import call_prompt, stdin_prompt
from engine.tasks.row import BadRow, Row, embedded, fingerprint, mapping, reference, sequence, stratum, text
from engine.types import Task
from sandbox import Tests


def read_verifiable(row: Row, how: Reading) -> Task:
    """A verifiable coding problem as a task. Raises BadRow."""
    info = mapping(row.get("verification_info"), "verification_info")
    metadata = mapping(row.get("metadata"), "metadata")
    language = info.get("language") or "python"
    if str(language).lower() not in ("python", "python3"):
        raise BadRow("not Python", str(language))
    statement = text(row, "prompt" if row.get("problem_statement") is None else "problem_statement")
    given = row.get("problem_id") or row.get("in_source_id")
    name = f"verifiable/{given or fingerprint(statement)}"
    tests, entry_point = typed_tests(sequence(info.get("test_cases"), "test_cases"), statement, name, how)
    style = how.prompt or "instruct"
    return Task(
        id=name,
        prompt=call_prompt(statement, "", entry_point, style) if entry_point else stdin_prompt(statement, style),
        tests=tests,
        reference=reference(row.get("gold_standard_solution")),
        source=stratum("verifiable", row.get("source"), metadata.get("difficulty")),
        limits=limits_of(metadata.get("time_limit"), _megabytes(metadata)),
    )


def typed_tests(cases: list[Any], statement: str, name: str, how: Reading) -> tuple[Tests, str]:
    """Tests from cases that say their type and, for calls, their function; and its name. Raises BadRow.

    Types in use: `stdin_stdout` and `stdin`; `function_call`, whose input is a list of arguments.
    """
    if not cases:
        raise BadRow("no cases")
    if not all(isinstance(case, dict) and "input" in case and "output" in case for case in cases):
        raise BadRow("a field cannot be read", "a case must have input and output")
    types = {str(case.get("type") or case.get("testtype") or "stdin_stdout") for case in cases}
    pairs: list[Pair] = [(case["input"], case["output"]) for case in cases]
    if types <= {"stdin_stdout", "stdin"}:
        return stdin_tests(pairs, statement, name, how), ""
    if types != {"function_call"}:
        raise BadRow("cases of an unknown type", ", ".join(sorted(types)))
    names = {case.get("fn_name") for case in cases}
    entry_point = names.pop() if len(names) == 1 else None
    if not isinstance(entry_point, str) or not entry_point:
        raise BadRow("no entry point", "the calls name no function, or several")
    calls = listed_calls([given for given, _ in pairs], [_value(wanted) for _, wanted in pairs])
    return call_tests(entry_point, calls, statement, name, how), entry_point


def _value(wanted: object) -> object:
    """A call's result: text that is JSON or a literal stands for the value, other text for itself."""
    try:
        return embedded(wanted, "a result")
    except BadRow:
        return wanted


def _megabytes(metadata: dict[str, Any]) -> float | None:
    size = metadata.get("memory_limit_bytes")
    return size / (1 << 20) if isinstance(size, (int, float)) else None
