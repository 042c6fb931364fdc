"""Plain data between a jail and the host: a closed set of exact built-in types, as JSON text.

None, bool, float, str and small int are themselves, list is an array; a big int, bytes, complex, tuple, dict,
set and frozenset are one-key objects. Subclasses are refused: `type(x) is int`, so nothing that a program
defines can decide how it compares. This file also runs inside jails, so it uses the standard library only.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # importing typing would cost a jail several milliseconds
if TYPE_CHECKING:
    from typing import Any

MAX_DEPTH = 200
MAX_NODES = 2_000_000
_SMALL = 1 << 60
_SCALARS = frozenset({type(None), bool, float, str, int})


class NotPlain(ValueError):
    """A value is not of the closed set, too deep, or too large."""


def encode(value: Any, dumps: Any = json.dumps) -> bytes:
    """`value` as ASCII JSON. Raises NotPlain."""
    budget = [MAX_NODES]
    return dumps(_pack(value, MAX_DEPTH, budget)).encode("ascii")


def _pack(value: Any, depth: int, budget: list[int]) -> Any:
    kind = type(value)
    budget[0] -= 1
    if depth <= 0 or budget[0] <= 0:
        raise NotPlain("the value is too deep or too large")
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"i": hex(value)}
    if kind is list:
        return value if _is_simple(value, budget) else [_pack(item, depth - 1, budget) for item in value]
    if kind is tuple:
        return {"t": [_pack(item, depth - 1, budget) for item in value]}
    if kind is dict:
        return {"d": [[_pack(k, depth - 1, budget), _pack(v, depth - 1, budget)] for k, v in value.items()]}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "f": [_pack(item, depth - 1, budget) for item in value]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    raise NotPlain(f"the value has type {kind.__name__}, which is not plain data")


def _is_simple(items: list[Any], budget: list[int]) -> bool:
    """Whether JSON has these items as they are: seen at C's speed, for the long lists that programs return."""
    kinds = set(map(type, items))
    budget[0] -= len(items)
    if budget[0] <= 0 or not kinds <= _SCALARS:
        return False
    return int not in kinds or all(-_SMALL < item < _SMALL for item in items if type(item) is int)


def decode(data: bytes, loads: Any = json.loads) -> Any:
    """The value that `encode` was given. Raises NotPlain on anything else, and never runs code from it."""
    try:
        return _unpack(loads(data), MAX_DEPTH)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
        raise NotPlain(f"not plain data: {error}") from None


def _unpack(value: Any, depth: int) -> Any:
    if depth <= 0:
        raise NotPlain("too deep")
    if isinstance(value, list):
        return value if set(map(type, value)) <= _SCALARS else [_unpack(item, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise NotPlain("an object must have one key")
    ((tag, inner),) = value.items()
    if tag == "i":
        return int(inner, 16)
    if tag == "b":
        return bytes.fromhex(inner)
    if tag == "c":
        return complex(float(inner[0]), float(inner[1]))
    if tag == "d":
        return {_unpack(k, depth - 1): _unpack(v, depth - 1) for k, v in inner}
    items = [_unpack(item, depth - 1) for item in inner]
    if tag == "t":
        return tuple(items)
    if tag == "s":
        return set(items)
    if tag == "f":
        return frozenset(items)
    raise NotPlain(f"unknown tag {tag!r}")
