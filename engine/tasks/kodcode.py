"""KodCode rows: a question, a solution, and a pytest file that imports the solution.

Format of `KodCode/KodCode-V1` and `KodCode/KodCode-Light-RL-10K`: question_id (conversation_id in the SFT sets),
style, subset, question, solution, test, test_info [{function_name, function_declaration, ...}], gpt_difficulty.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

from engine.tasks.cases import Reading
from engine.tasks.prompt import call_prompt
from engine.tasks.row import BadRow, Row, embedded, identity, optional_text, reference, stratum, syntax_tree, text
from engine.types import Task
from sandbox import AssertTests

OFFERED = frozenset({*sys.stdlib_module_names, "pytest", "solution"})
"""Modules that tests may import: the jail has no others."""


def read_kodcode(row: Row, how: Reading) -> Task:
    """A KodCode row as a task with assert tests. Raises BadRow."""
    tests = text(row, "test_code" if row.get("test_code") else "test")
    tree = syntax_tree(tests)
    if tree is None:
        raise BadRow("the tests are not Python")
    imports = _imports(tree)
    foreign = sorted(name for name in imports if name not in OFFERED)
    if foreign:
        raise BadRow("the tests import a package", foreign[0])
    if not any(isinstance(node, ast.Assert) or _is_raises(node) for node in ast.walk(tree)):
        raise BadRow("no cases", "the tests assert nothing")
    info = _info(row.get("test_info"))
    names = [alias.name for node in _from_solution(tree) for alias in node.names if alias.name != "*"]
    declared = [str(item["function_name"]) for item in info if item.get("function_name")]
    entry_point = next(iter(names + declared), optional_text(row, "test_entry_point"))
    if not entry_point.isidentifier():
        raise BadRow("no entry point", "the tests import nothing from the solution")
    question = text(row, "question")
    starter = "\n".join(str(item["function_declaration"]) for item in info if item.get("function_declaration"))
    return Task(
        id=f"kodcode/{identity(row, 'question_id', 'conversation_id')}",
        prompt=call_prompt(question, "" if starter in question else starter, entry_point, how.prompt or "instruct"),
        tests=AssertTests(entry_point, tests),
        reference=reference(row.get("solution")),
        source=stratum("kodcode", row.get("subset"), row.get("gpt_difficulty")),
    )


def _imports(tree: ast.Module) -> set[str]:
    found = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    return found | {(n.module or ".").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


def _from_solution(tree: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "solution"]


def _is_raises(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and (node.attr == "raises" or node.attr.startswith("assert"))


def _info(value: object) -> list[dict[str, Any]]:
    """test_info as a list of objects: also from JSON, or from the object of lists that Arrow makes of one."""
    found = embedded(value, "test_info") if value not in (None, "") else []
    if isinstance(found, dict):
        columns = {key: items for key, items in found.items() if isinstance(items, list)}
        if not columns:
            return [found]
        return [dict(zip(columns, items, strict=True)) for items in zip(*columns.values(), strict=False)]
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
