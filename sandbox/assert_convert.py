"""Turns test code into call cases where it says no more than that: the safest way to run it.

Understood: assert statements with one call of the entry point, at the top level, in `check(candidate)`, or in
`test_*` functions without parameters, with arguments that can be computed from literals, loops over literals, and
assignments of literals. All else gives None, and the caller runs the test code as it is.

What an assertion says about the call's result is evaluated here, on the host, by a small evaluator with a closed
set of operations, none of which grows with a value that the program chose. Equality is Python's, on exact
built-in types, since that is what the assertion's author wrote.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox import plain

MAX_CASES = 500
MAX_SOURCE = 1 << 17
_SIZE = 100_000  # of a literal sequence that the tests compute

_TYPES: dict[str, type] = {
    "int": int, "float": float, "str": str, "bool": bool, "list": list, "tuple": tuple, "dict": dict, "set": set,
}  # fmt: skip


class _No(Exception):
    """Not understood."""


class _Result:
    """Stands for the call's result while an assertion is read."""


@dataclass(frozen=True, slots=True)
class ConvertedAssert:
    """One assertion: the arguments of its call, and the expression with the call in it."""

    args: tuple[object, ...]
    named: dict[str, object]
    line: int
    test: ast.expr
    call: ast.Call
    names: dict[str, object]


def convert(code: str, entry_point: str) -> tuple[ConvertedAssert, ...] | None:
    """The assertions of `code` about `entry_point`, in order; None if they cannot be taken out of it."""
    if len(code) > MAX_SOURCE or not entry_point.isidentifier():
        return None
    try:
        tree = ast.parse(code)
        reader = _Reader(entry_point)
        reader.module(tree.body)
    except (_No, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tuple(reader.cases) or None


def holds(case: ConvertedAssert, result: object) -> bool:
    """Whether the assertion is true of `result`, which is plain data. An error in it is a failed assertion."""
    try:
        return bool(_evaluate(case.test, case.names, case.call, result))
    except (_No, ArithmeticError, TypeError, ValueError, LookupError, RecursionError):
        return False


class _Reader:
    def __init__(self, entry_point: str) -> None:
        self.entry_point = entry_point
        self.aliases = {entry_point}
        self.cases: list[ConvertedAssert] = []
        self.functions: dict[str, ast.FunctionDef] = {}
        self.called: set[str] = set()

    def module(self, body: list[ast.stmt]) -> None:
        names: dict[str, object] = {}
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                self.function(statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.imports(statement)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self.call_check(statement.value)
            else:
                self.statement(statement, names)
        if "check" in self.functions and "check" not in self.called:
            self.body(self.functions["check"], names)
        for name, function in self.functions.items():
            if name.startswith("test"):
                self.body(function, names)

    def function(self, node: ast.FunctionDef) -> None:
        plain_arguments = not (node.args.vararg or node.args.kwarg or node.args.kwonlyargs or node.args.defaults)
        wanted = 1 if node.name == "check" else 0
        if node.decorator_list or not plain_arguments or len(node.args.args) != wanted or node.args.posonlyargs:
            raise _No
        if (node.name != "check" and not node.name.startswith("test")) or node.name in self.functions:
            raise _No
        self.functions[node.name] = node

    def imports(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            good = all(alias.name == "math" and alias.asname is None for alias in node.names)
        else:
            good = node.module == "solution" and all(
                alias.name == self.entry_point and alias.asname is None for alias in node.names
            )
        if not good:
            raise _No

    def call_check(self, node: ast.Call) -> None:
        """`check(f)` at the top level."""
        good = isinstance(node.func, ast.Name) and node.func.id == "check" and "check" in self.functions
        given = [ast.unparse(argument) for argument in node.args]
        if not good or given != [self.entry_point] or node.keywords:
            raise _No
        self.called.add("check")
        self.body(self.functions["check"], {})

    def body(self, node: ast.FunctionDef, outer: dict[str, object]) -> None:
        names = dict(outer)
        before = set(self.aliases)
        self.aliases |= {argument.arg for argument in node.args.args}
        for statement in node.body:
            self.statement(statement, names)
        self.aliases = before

    def statement(self, node: ast.stmt, names: dict[str, object]) -> None:
        if isinstance(node, ast.Assert):
            self.assertion(node, names)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self.bind(node.targets[0], _evaluate(node.value, names, None, None), names)
        elif isinstance(node, ast.For) and not node.orelse:
            items = _evaluate(node.iter, names, None, None)
            if not isinstance(items, (list, tuple, range, enumerate, zip)):
                raise _No
            for item in items:
                self.bind(node.target, item, names)
                for statement in node.body:
                    self.statement(statement, names)
        elif not (isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))):
            raise _No

    def bind(self, target: ast.expr, value: object, names: dict[str, object]) -> None:
        if isinstance(target, ast.Name) and target.id not in self.aliases:
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (list, tuple)):
            if len(target.elts) != len(value):
                raise _No
            for element, item in zip(target.elts, value, strict=True):
                self.bind(element, item, names)
        else:
            raise _No

    def assertion(self, node: ast.Assert, names: dict[str, object]) -> None:
        calls = [n for n in ast.walk(node.test) if isinstance(n, ast.Call) and self.is_entry(n.func)]
        if len(calls) != 1 or len(self.cases) >= MAX_CASES:
            raise _No
        call = calls[0]
        args: list[object] = []
        for argument in call.args:
            if isinstance(argument, ast.Starred):
                spread = _evaluate(argument.value, names, None, None)
                if not isinstance(spread, (list, tuple)):
                    raise _No
                args += spread
            else:
                args.append(_evaluate(argument, names, None, None))
        named = {k.arg: _evaluate(k.value, names, None, None) for k in call.keywords if k.arg is not None}
        if len(named) != len(call.keywords):
            raise _No
        plain.encode([args, named])  # ValueError: not plain data
        _check(node.test, names, call)
        self.cases.append(ConvertedAssert(tuple(args), named, node.lineno, node.test, call, dict(names)))

    def is_entry(self, function: ast.expr) -> bool:
        return isinstance(function, ast.Name) and function.id in self.aliases


def _check(test: ast.expr, names: dict[str, object], call: ast.Call) -> None:
    """Raise _No unless every part of the assertion is an operation that `_evaluate` has."""
    inside = {id(node) for argument in [*call.args, *call.keywords] for node in ast.walk(argument)}
    for node in ast.walk(test):
        if id(node) in inside or node is call or node is call.func:
            continue
        if isinstance(node, ast.Name):
            known = node.id in names or node.id in _FUNCTIONS or node.id in _TYPES or node.id == "math"
        elif isinstance(node, ast.BinOp):
            # With the result in it: only what cannot grow.
            mixed = any(child is call for child in ast.walk(node))
            known = isinstance(node.op, (ast.Add, ast.Sub) if mixed else tuple(_BINARY))
        elif isinstance(node, ast.Call):
            known = (not node.keywords and _function(node.func) is not None) or _is_isclose(node)
            mixed = any(child is call for child in ast.walk(node))
            known = known and not (mixed and isinstance(node.func, ast.Name) and node.func.id == "range")
        elif isinstance(node, ast.Compare):
            same = [b for o, b in zip(node.ops, node.comparators, strict=True) if isinstance(o, ast.Is | ast.IsNot)]
            known = all(isinstance(b, ast.Constant) and b.value in (None, True, False) for b in same)
            known = known and not any(isinstance(b, ast.Constant) and type(b.value) is int for b in same)
        elif isinstance(node, ast.Attribute):
            known = isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _MATH
        else:
            known = isinstance(node, _NODES)
        if not known:
            raise _No


_BINARY: dict[type, Callable[[Any, Any], object]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Is: lambda a, b: a is b if b is None or isinstance(b, bool) else _not_understood(),
    ast.IsNot: lambda a, b: a is not b if b is None or isinstance(b, bool) else _not_understood(),
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_FUNCTIONS = {
    "abs": abs, "len": len, "sorted": sorted, "set": set, "list": list, "tuple": tuple, "round": round, "sum": sum,
    "min": min, "max": max, "any": any, "all": all, "bool": bool, "isinstance": isinstance, "range": range,
    "zip": zip, "enumerate": enumerate, "type": type,
}  # fmt: skip
_MATH = {
    "isclose": math.isclose,
    "inf": math.inf,
    "pi": math.pi,
    "e": math.e,
    "nan": math.nan,
    "isnan": math.isnan,
}
_NODES = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Subscript,
    ast.Slice, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context, ast.keyword, ast.Starred,
)  # fmt: skip


def _not_understood() -> bool:
    raise _No


def _function(node: ast.expr) -> object:
    if isinstance(node, ast.Name):
        return _FUNCTIONS.get(node.id)
    return _MATH.get(node.attr) if isinstance(node, ast.Attribute) else None


def _is_isclose(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "isclose"


def _evaluate(node: ast.expr, names: dict[str, object], call: ast.Call | None, result: object) -> object:
    """The value of an expression of literals, `names`, and the call's result. Raises _No and what Python raises."""

    def value(inner: ast.expr) -> object:
        return _evaluate(inner, names, call, result)

    if node is call:
        return result
    match node:
        case ast.Constant(value=constant) if constant is not Ellipsis:
            return constant
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if name in _TYPES:
            return _TYPES[name]
        case ast.List(elts=elements):
            return [value(element) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(value(element) for element in elements)
        case ast.Set(elts=elements):
            return {value(element) for element in elements}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {value(key): value(item) for key, item in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _number(-_number(value(operand)))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(value(operand))
        case ast.BinOp(left=left, op=operation, right=right):
            return _binary(operation, value(left), value(right))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(value(item) for item in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(value(item) for item in values)
        case ast.Compare(left=left, ops=operations, comparators=others):
            sides = [value(left), *(value(other) for other in others)]
            return all(_COMPARE[type(o)](a, b) for o, a, b in zip(operations, sides, sides[1:], strict=False))
        case ast.Subscript(value=owner, slice=ast.Slice(lower=lower, upper=upper, step=step)):
            bounds = [None if bound is None else value(bound) for bound in (lower, upper, step)]
            return value(owner)[slice(*bounds)]  # type: ignore[index]
        case ast.Subscript(value=owner, slice=index):
            return value(owner)[value(index)]  # type: ignore[index]
        case ast.Attribute(value=ast.Name(id="math"), attr=attribute) if attribute in _MATH:
            return _MATH[attribute]
        case ast.Call(func=function, args=args, keywords=keywords):
            found = _function(function)
            if not callable(found) or (keywords and not _is_isclose(node)):
                raise _No
            given = [value(argument) for argument in args]
            if found is range and len(range(*[operator.index(n) for n in given])) > _SIZE:  # type: ignore[arg-type]
                raise _No
            if found is sum and any(not isinstance(item, (int, float)) for item in given[0]):  # type: ignore[attr-defined]
                raise _No
            return found(*given, **{keyword.arg: value(keyword.value) for keyword in keywords if keyword.arg})
    raise _No


def _number(value: object) -> int | float:
    if type(value) not in (int, float, bool):
        raise _No
    return value  # type: ignore[return-value]


def _binary(operation: ast.operator, left: object, right: object) -> object:
    """Arithmetic within bounds: tests may say `[0] * 1000` and `10 ** 9`, not `10 ** 10 ** 10`."""
    function = _BINARY.get(type(operation))
    if function is None or (isinstance(left, str) and isinstance(operation, ast.Mod)):
        raise _No
    if isinstance(operation, ast.Pow):
        if abs(_number(right)) > 4000 or abs(_number(left)) > 1 << 64:
            raise _No
    elif isinstance(operation, ast.Mult):
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (list, tuple, str, bytes)) and (not isinstance(other, int) or len(one) * other > _SIZE):
                raise _No
    return function(left, right)
