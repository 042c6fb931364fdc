"""Is an output right? One rule for each mode, none of them ever tried after another.

`exact`: the same bytes.
`lines`: CRLF and CR are LF; blanks at the end of a line and empty lines at the end do not count. Then the same
    number of lines, on each line the same number of tokens (split at blanks), and each pair of tokens equal.
`tokens`: the same, with the whole output as one line.

Two tokens are equal if they are the same text, or
* expected is an integer and actual a decimal of exactly its value (`3.0` for `3`); two integers must be the
  same text (`007`, `+7`, `-0` are not `7`, `7`, `0`);
* expected is a decimal (it has a point or an exponent) and actual an integer or decimal with
  |actual - expected| <= 1e-6 or <= 1e-6 * |expected|.
Numbers are ASCII, short, and of modest exponent; nan, inf, 0x10, 1_000 are only ever text. So are bytes that
are not UTF-8, and NULs: they make a token that no honest expected output has.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal

from sandbox.types import Compare

TOLERANCE = Decimal("1e-6")
_MAX_NUMBER = 400  # characters; a longer decimal is only text
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]{1,3})?\Z")
_BLANKS = re.compile(r"[ \t\v\f]+")
_EXACT = Context(prec=2500)
_SHOWN = 40


def matches(actual: bytes, expected: str, mode: Compare) -> bool:
    """Whether `actual` is right under `mode`. Never raises, whatever the bytes."""
    return difference(actual, expected, mode) == ""


def difference(actual: bytes, expected: str, mode: Compare) -> str:
    """The first difference in words, shortened; empty if `actual` is right."""
    if mode == "exact":
        wanted = expected.encode("utf-8", "surrogateescape" if _escaped(expected) else "surrogatepass")
        return "" if actual == wanted else _exact_difference(actual, wanted)
    got, want = _lines(actual.decode("utf-8", "surrogateescape")), _lines(expected)
    if got == want:
        return ""
    if mode == "tokens":
        got, want = [" ".join(got)], [" ".join(want)]
    return _lines_difference(got, want)


def _escaped(text: str) -> bool:
    """Whether `text` was decoded from bytes that are not UTF-8."""
    surrogates = [char for char in text if "\ud800" <= char <= "\udfff"]
    return bool(surrogates) and all("\udc80" <= char <= "\udcff" for char in surrogates)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip(" \t\v\f") for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _lines_difference(got: list[str], want: list[str]) -> str:
    for number, (got_line, want_line) in enumerate(zip(got, want, strict=False), 1):
        if got_line == want_line:
            continue
        got_tokens, want_tokens = _split(got_line), _split(want_line)
        for place, (got_token, want_token) in enumerate(zip(got_tokens, want_tokens, strict=False), 1):
            if not same_token(got_token, want_token):
                return f"line {number}, token {place}: got {shorten(got_token)}, expected {shorten(want_token)}"
        if len(got_tokens) != len(want_tokens):
            return f"line {number}: got {len(got_tokens)} tokens, expected {len(want_tokens)}"
    if len(got) != len(want):
        return f"got {len(got)} lines, expected {len(want)}"
    return ""


def _split(line: str) -> list[str]:
    return [token for token in _BLANKS.split(line) if token]


def same_token(actual: str, expected: str) -> bool:
    """The rule for two tokens, see the module's docstring."""
    if actual == expected:
        return True
    if len(actual) > _MAX_NUMBER or len(expected) > _MAX_NUMBER:
        return False
    actual_decimal = _DECIMAL.match(actual) is not None
    if _INTEGER.match(expected):
        return actual_decimal and Decimal(actual) == Decimal(expected)
    if not _DECIMAL.match(expected) or not (actual_decimal or _INTEGER.match(actual)):
        return False
    quick = abs(float(actual) - float(expected)) / max(1.0, abs(float(expected)))
    if quick < 0.99e-6 or quick > 1.01e-6:  # where rounding cannot matter; false for the nan of huge numbers
        return quick < 1e-6
    wanted = Decimal(expected)
    gap = abs(_EXACT.subtract(Decimal(actual), wanted))
    return gap <= TOLERANCE or gap <= _EXACT.multiply(TOLERANCE, abs(wanted))


def _exact_difference(got: bytes, want: bytes) -> str:
    place = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return f"byte {place}: got {got[place : place + 20]!r}, expected {want[place : place + 20]!r}"


def shorten(text: str) -> str:
    """At most `_SHOWN` characters of `text`, quoted."""
    return repr(text) if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]!r}…"
