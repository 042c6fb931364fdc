"""MBPP and MBPP+: a sentence, a program, and assert statements.

Format of `google-research-datasets/mbpp`: task_id, text, code, test_setup_code, test_list, challenge_test_list; its
sanitized configuration: task_id, prompt, code, test_imports, test_list; `evalplus/mbppplus`: the same and `test`.
The prompt shows the first assertion of test_list, for the function's name; `cases = hidden` leaves that one out of
the tests. EvalPlus's native MBPP+ JSONL is refused: JSON has turned the tuples and sets of its inputs into lists.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from engine.tasks.cases import Reading, call_tests, chosen
from engine.tasks.evalplus import literal_calls, without_numpy
from engine.tasks.prompt import WHOLE_PROGRAM
from engine.tasks.row import BadRow, Row, identity, lf, optional_text, sequence, syntax_tree, text
from engine.types import Task
from sandbox import AssertTests, Tests


def read_mbpp(row: Row, how: Reading) -> Task:
    """An MBPP or MBPP+ row as a task. Raises BadRow."""
    if row.get("plus_input") is not None:
        raise BadRow("EvalPlus's native MBPP+", "its tuples are lost; take the published evalplus/mbppplus")
    name = f"{'MBPPPlus' if row.get('test') else 'MBPP'}/{identity(row, 'task_id').rpartition('/')[2]}"
    code = text(row, "code")
    said = text(row, "text" if row.get("text") else "prompt").strip()
    asserts = [lf(line) for line in sequence(row.get("test_list"), "test_list") if isinstance(line, str)]
    if not asserts:
        raise BadRow("no cases", "test_list is empty")
    entry_point = _entry_point(asserts[0], code)
    shown = f"{said}\n\nYour program must satisfy this assertion:\n{asserts[0].strip()}"
    return Task(
        id=name,
        prompt=shown if how.prompt == "statement" else f"{shown}\n\n{WHOLE_PROGRAM}\n",
        tests=_tests(row, asserts, entry_point, name, how),
        reference=code,
        source="mbpp-plus" if row.get("test") else "mbpp",
    )


def _tests(row: Row, asserts: list[str], entry_point: str, name: str, how: Reading) -> Tests:
    hidden = how.cases == "hidden"
    if row.get("test"):
        tests = text(row, "test")
        calls = literal_calls(tests, entry_point)
        if calls is None:
            return AssertTests(entry_point, without_numpy(tests))
        shown = _arguments(asserts[0], entry_point) if hidden else None
        kept = [(args, result) for args, result in calls if shown is None or args != shown]
        return call_tests(entry_point, kept, "", name, replace(how, cases="all"))
    challenge = [lf(line) for line in sequence(row.get("challenge_test_list"), "challenge_test_list")]
    judged = (asserts[1:] if hidden else asserts) + challenge
    if not judged:
        raise BadRow("no hidden case", "the prompt shows the only assertion")
    if len(judged) < how.min_cases:
        raise BadRow("too few cases", str(len(judged)))
    judged = chosen(judged, name, how.max_cases)
    setup = sequence(row.get("test_imports"), "test_imports") or [optional_text(row, "test_setup_code")]
    lines = [line.rstrip() for line in map(str, [*setup, *judged]) if line.strip()]
    tests = "\n".join(lines) + "\n"
    if syntax_tree(tests) is None:
        raise BadRow("the tests are not Python")
    return AssertTests(entry_point, tests)


def _entry_point(assertion: str, code: str) -> str:
    """The function that the assertion calls and the program defines. Raises BadRow."""
    tree, program = syntax_tree(assertion.strip()), syntax_tree(code)
    if tree is None:
        raise BadRow("the tests are not Python")
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    called = [node.func.id for node in calls if isinstance(node.func, ast.Name)]
    defined = {n.name for n in program.body if isinstance(n, ast.FunctionDef)} if program else set(called)
    found = [name for name in called if name in defined]
    if not found:
        raise BadRow("no entry point", "the first assertion calls no function of the program")
    return found[0]


def _arguments(assertion: str, entry_point: str) -> list[Any] | None:
    """The arguments of the assertion's call, if they are literals."""
    tree = syntax_tree(assertion.strip())
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == entry_point:
            try:
                return [ast.literal_eval(argument) for argument in node.args]
            except (ValueError, TypeError, MemoryError, RecursionError):
                return None
    return None
