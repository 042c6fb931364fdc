"""Is a result of a call right? Both sides are plain data; nothing here can run a program's code.

Tuples and lists are the same, recursively. bool is not int. Where an int is expected, an int or a float of exactly
its value; where a float is, a number within 1e-6, absolute or relative; nan only equals nan. Dict keys: as they are,
or, since JSON knows only text keys, `str(key)`. Sets equal sets and frozensets. None equals only None.
"""

from __future__ import annotations

import math

from sandbox.compare import shorten

TOLERANCE = 1e-6


def same(actual: object, expected: object) -> bool:
    """Whether a call's result is the expected one."""
    return unlike(actual, expected) == ""


def unlike(actual: object, expected: object, where: str = "result") -> str:
    """The first difference in words, shortened; empty if they are the same."""
    if isinstance(expected, (list, tuple)):
        return _sequences(actual, expected, where)
    if isinstance(expected, dict):
        return _dicts(actual, expected, where)
    if isinstance(expected, (set, frozenset)):
        good = isinstance(actual, (set, frozenset)) and actual == expected
        return "" if good else _say(where, actual, expected)
    if _numbers(actual, expected):
        return "" if _close(actual, expected) else _say(where, actual, expected)
    good = type(actual) is type(expected) and actual == expected
    return "" if good else _say(where, actual, expected)


def _numbers(actual: object, expected: object) -> bool:
    return type(actual) in (int, float) and type(expected) in (int, float)


def _close(actual: object, expected: object) -> bool:
    assert isinstance(actual, int | float)
    assert isinstance(expected, int | float)
    if type(expected) is int:
        return actual == expected
    try:
        got, want = float(actual), float(expected)
    except OverflowError:  # an int beyond any float
        return actual == expected
    if math.isnan(want):
        return math.isnan(got)
    if got == want:
        return True
    if math.isinf(got) or math.isinf(want):
        return False
    gap = abs(got - want)
    return gap <= TOLERANCE or gap <= TOLERANCE * abs(want)


def _sequences(actual: object, expected: list[object] | tuple[object, ...], where: str) -> str:
    if not isinstance(actual, (list, tuple)):
        return _say(where, actual, expected)
    if len(actual) != len(expected):
        return f"{where}: got {len(actual)} items, expected {len(expected)}"
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        found = unlike(got, want, f"{where}[{index}]")
        if found:
            return found
    return ""


def _dicts(actual: object, expected: dict[object, object], where: str) -> str:
    if not isinstance(actual, dict):
        return _say(where, actual, expected)
    if len(actual) != len(expected):
        return f"{where}: got {len(actual)} keys, expected {len(expected)}"
    typed = {(type(key), key): value for key, value in actual.items()}  # True and 1 are different keys
    texts = {str(key): value for key, value in actual.items() if not isinstance(key, str)}
    for key, want in expected.items():
        if (type(key), key) in typed:
            got = typed[type(key), key]
        elif isinstance(key, str) and key in texts:
            got = texts[key]
        else:
            return f"{where}: no key {shorten(repr(key))}"
        found = unlike(got, want, f"{where}[{shorten(repr(key))}]")
        if found:
            return found
    return ""


def _say(where: str, actual: object, expected: object) -> str:
    return f"{where}: got {_show(actual)}, expected {_show(expected)}"


def _show(value: object) -> str:
    if type(value) is int and abs(value) > 1 << 200:  # repr of it may be slow, or refused
        return "a very large int"
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        return shorten(repr(value))
    except ValueError:  # a very large int somewhere inside
        return f"a {type(value).__name__}"
