"""Runs inside jails: the little of pytest that data sets' tests use, for an interpreter that has no pytest."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class raises:  # pytest's name
    """`with pytest.raises(ValueError, match="x"):`, or `pytest.raises(ValueError, f, 1)`."""

    def __init__(self, expected: Any, *call: Any, match: str | None = None, **named: Any) -> None:
        self.expected = expected
        self.match = match
        self.value: Any = None
        if call:
            with self:
                call[0](*call[1:], **named)

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not issubclass(kind, self.expected):
            return False
        self.value = error
        if self.match is not None:
            import re

            if not re.search(self.match, str(error)):
                raise AssertionError(f"{self.match!r} is not in {str(error)!r}")
        return True


class approx:  # pytest's name
    """Numbers, and lists, tuples and dicts of numbers, within 1e-6 relative or 1e-12 absolute."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected = expected
        self.rel = (1e-6 if abs is None else 0.0) if rel is None else rel
        self.abs = 1e-12 if abs is None else abs

    def __eq__(self, actual: object) -> bool:
        return self._close(actual, self.expected)

    def __ne__(self, actual: object) -> bool:
        return not self._close(actual, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def _close(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, (list, tuple)):
            same = isinstance(actual, (list, tuple)) and len(actual) == len(expected)
            return same and all(self._close(a, e) for a, e in zip(actual, expected, strict=True))
        if isinstance(expected, dict):
            same = isinstance(actual, dict) and actual.keys() == expected.keys()
            return same and all(self._close(actual[key], expected[key]) for key in expected)
        if not isinstance(expected, (int, float)) or not isinstance(actual, (int, float)):
            return type(actual) is type(expected) and bool(actual == expected)
        if actual == expected:
            return True
        gap = abs(actual - expected)
        return bool(gap <= max(self.abs, self.rel * abs(expected)) and gap < float("inf"))


class _Mark:
    def __getattr__(self, name: str) -> Any:
        def mark(*args: Any, **named: Any) -> Any:
            if len(args) == 1 and callable(args[0]) and not named:
                return args[0]

            def keep(function: Any) -> Any:
                if name == "parametrize":
                    function.__dict__.setdefault("rlvr_cases", []).append(args[:2])
                return function

            return keep

        return mark


mark = _Mark()


def param(*values: Any, **_: Any) -> Any:
    return values if len(values) != 1 else values[0]


def fail(reason: str = "") -> None:
    raise AssertionError(reason)
