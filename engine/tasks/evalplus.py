"""EvalPlus's test code, read as call cases where it is no more than that.

The published HumanEval+ and MBPP+ rows (`evalplus/humanevalplus`, `evalplus/mbppplus`) hold test code that defines
`assertion(out, exp, atol)`, then lists `inputs` and `results` as literals, and loops over both. As call cases they
are compared on the host, out of the program's reach, by the sandbox's rule: within 1e-6 absolute or relative where
EvalPlus has 1e-6 absolute or 1e-7 relative, and tuples equal lists. A looser tolerance, or a loop that computes the
expected result, stays test code.
"""

from __future__ import annotations

import ast
from typing import Any

from engine.tasks.row import MAX_LITERAL, syntax_tree

MAX_ATOL = 1e-6  # what the comparison of calls has
_WITHOUT_NUMPY = '''class np:
    """What these tests use of NumPy, for an interpreter that has none."""

    ndarray = float64 = float32 = ()

    @staticmethod
    def allclose(out, exp, rtol=1e-07, atol=1e-08):
        if isinstance(exp, (list, tuple)):
            same = isinstance(out, (list, tuple)) and len(out) == len(exp)
            return same and all(np.allclose(o, e, rtol, atol) for o, e in zip(out, exp))
        return out == exp or abs(out - exp) <= atol + rtol * abs(exp)

    class testing:
        @staticmethod
        def assert_allclose(out, exp, rtol=1e-07, atol=0.0):
            assert np.allclose(out, exp, rtol, atol)
'''


def literal_calls(tests: str, entry_point: str) -> list[tuple[list[Any], Any]] | None:
    """The arguments and results that EvalPlus's test code lists; None if it does anything else with them."""
    tree = syntax_tree(tests, MAX_LITERAL)
    if tree is None:
        return None
    body = next((n.body for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"), tree.body)
    lists = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    loops = [node for node in body if isinstance(node, ast.For)]
    if not {"inputs", "results"} <= lists.keys() or len(loops) != 1 or not _is_plain(loops[0], entry_point):
        return None
    try:
        inputs, results = ast.literal_eval(lists["inputs"]), ast.literal_eval(lists["results"])
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None
    if not isinstance(inputs, list) or not isinstance(results, list) or len(inputs) != len(results):
        return None
    if not all(isinstance(args, (list, tuple)) for args in inputs):
        return None
    return [(list(args), result) for args, result in zip(inputs, results, strict=True)]


def without_numpy(tests: str) -> str:
    """Test code that needs no NumPy, if comparing within a tolerance is all that it uses it for."""
    tree = syntax_tree(tests, MAX_LITERAL)
    if tree is None or "import numpy as np\n" not in tests:
        return tests
    used = {
        ast.unparse(node).removeprefix("np.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("np.")
    }
    if used - {"allclose", "testing", "testing.assert_allclose", "ndarray", "float64", "float32"}:
        return tests
    return tests.replace("import numpy as np\n", _WITHOUT_NUMPY, 1)


def _is_plain(loop: ast.For, entry_point: str) -> bool:
    """Whether it is `for i, (inp, exp) in enumerate(zip(inputs, results)): assertion(f(*inp), exp, atol)`."""
    if ast.unparse(loop.target) not in ("(i, (inp, exp))", "i, (inp, exp)") or len(loop.body) != 1:
        return False
    if ast.unparse(loop.iter) != "enumerate(zip(inputs, results))":
        return False
    call = loop.body[0].value if isinstance(loop.body[0], ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "assertion" or len(call.args) != 3:
        return False
    tolerance = call.args[2].value if isinstance(call.args[2], ast.Constant) else None
    known = isinstance(tolerance, (int, float)) and 0 <= tolerance <= MAX_ATOL
    return (
        known
        and ast.unparse(call.args[0]) in ("candidate(*inp)", f"{entry_point}(*inp)")
        and ast.unparse(call.args[1]) == "exp"
    )
