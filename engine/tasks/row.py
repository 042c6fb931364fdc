"""What every reader needs of a row: typed fields, data embedded as text, programs without their fences.

Nothing here runs anything of a row: text becomes data by `json` and `ast.literal_eval` alone.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

MAX_DIGITS = 100_000  # of an integer; converting longer ones takes seconds
MAX_LITERAL = 1 << 24  # characters of a Python literal
MAX_PARSED = 1 << 17  # characters of a program that is parsed on the host
_FENCED = re.compile(r"\s*```[^\n`]*\n(.*?)(?:\n```\s*)?\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that gives no task: its name, a reason out of few, so that they can be counted, and what was seen."""

    row: str
    reason: str
    detail: str = ""


class BadRow(ValueError):
    """Raised by readers: a row that gives no task."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@contextmanager
def wide_integers() -> Iterator[None]:
    """Integers of up to MAX_DIGITS digits may be read and written; Python's own bound is 4,300."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def lf(text: str) -> str:
    """`text` with the line ends of Unix."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def text(row: Row, key: str) -> str:
    """A field that must be there and say something. Raises BadRow."""
    value = row.get(key)
    if not isinstance(value, str):
        raise BadRow("a field is missing", f"{key} must be text, not {type(value).__name__}")
    if not value.strip():
        raise BadRow("a field is empty", key)
    return lf(value)


def optional_text(row: Row, key: str) -> str:
    """A field's text; empty where there is none."""
    value = row.get(key)
    return lf(value) if isinstance(value, str) else ""


def identity(row: Row, *keys: str) -> str:
    """The row's own name: the first of `keys` that has one. Raises BadRow."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, int) or (isinstance(value, str) and value.strip()):
            return str(value).strip()
    raise BadRow("a field is missing", " or ".join(keys))


def fingerprint(*parts: str) -> str:
    """A name for what has none: it follows from the content."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def embedded(value: object, what: str) -> Any:
    """Data that a field holds as JSON or as a Python literal, or as it is. Raises BadRow."""
    if not isinstance(value, str):
        return value
    with wide_integers():
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            reason = str(error)
        if len(value) > MAX_LITERAL:
            raise BadRow("a field cannot be read", f"{what} is no JSON and has {len(value)} characters")
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise BadRow("a field cannot be read", f"{what} is neither JSON nor a Python literal: {reason}") from None


def mapping(value: object, what: str) -> dict[str, Any]:
    """`embedded`, and it must be a dict; nothing at all is an empty one. Raises BadRow."""
    found = embedded(value, what) if value not in (None, "") else {}
    if not isinstance(found, dict):
        raise BadRow("a field cannot be read", f"{what} must be an object, not {type(found).__name__}")
    return found


def sequence(value: object, what: str) -> list[Any]:
    """`embedded`, and it must be a list; nothing at all is an empty one. Raises BadRow."""
    found = embedded(value, what) if value not in (None, "") else []
    if not isinstance(found, (list, tuple)):
        raise BadRow("a field cannot be read", f"{what} must be a list, not {type(found).__name__}")
    return list(found)


def unfenced(code: str) -> str:
    """A program without the Markdown fence around it."""
    found = _FENCED.match(code)
    return lf(found[1] if found else code)


def parses(code: str) -> bool:
    """Whether it is Python 3 by its syntax. Never raises."""
    return syntax_tree(code) is not None


def syntax_tree(code: str, limit: int = MAX_PARSED) -> ast.Module | None:
    """The tree of a program; None if it has none, or more than `limit` characters. Never raises."""
    if len(code) > limit:
        return None
    try:
        with wide_integers():
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def reference(solutions: object) -> str | None:
    """One of a row's solutions: the first that is Python 3 by its syntax, else the first; None if there is none.

    `solutions` is a program, a list of them, or such a list as JSON.
    """
    if isinstance(solutions, str) and solutions.lstrip().startswith("["):
        try:
            solutions = embedded(solutions, "solutions")
        except BadRow:
            pass  # a program may begin with a bracket
    given = [solutions] if isinstance(solutions, str) else solutions
    if not isinstance(given, (list, tuple)):
        return None
    programs = [unfenced(code) for code in given if isinstance(code, str) and code.strip()]
    return next((code for code in programs if parses(code)), programs[0] if programs else None)


def stratum(*parts: object) -> str:
    """A task's source: the data set, and what it says of the row's origin and difficulty, joined by slashes."""
    words = (re.sub(r"[\s/]+", "-", str(part).strip()) for part in parts if part not in (None, ""))
    return "/".join(word for word in words if word)
