# ruff: noqa: E501  (programs as one-line strings)
"""What is right: outputs by each mode's one rule, results of calls, plain data over the wire."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sandbox.compare import difference, matches, same_token
from sandbox.equal import same, unlike
from sandbox.plain import NotPlain, decode, encode
from sandbox.types import Compare

MODES: tuple[Compare, ...] = ("lines", "tokens", "exact")
TOKENS = st.text(st.characters(codec="utf-8", exclude_categories=["Zs", "Cc", "Zl", "Zp"]), min_size=1)


@given(st.text(), st.sampled_from(MODES))
def test_an_output_is_right_against_itself(text: str, mode: Compare) -> None:
    assert matches(text.encode(), text, mode)


@given(st.binary(), st.sampled_from(MODES))
def test_bytes_of_any_kind_are_right_against_themselves(data: bytes, mode: Compare) -> None:
    assert matches(data, data.decode("utf-8", "surrogateescape"), mode)


@given(st.binary(), st.text(st.characters()), st.sampled_from(MODES))
def test_no_output_raises(data: bytes, expected: str, mode: Compare) -> None:
    assert isinstance(difference(data, expected, mode), str)


@given(st.lists(TOKENS, min_size=1, max_size=30), st.data(), st.sampled_from(MODES))
def test_a_prefix_of_the_tokens_never_passes(tokens: list[str], data: st.DataObject, mode: Compare) -> None:
    separators = [data.draw(st.sampled_from([" ", "\n", "  "])) for _ in tokens]
    expected = "".join(map("".join, zip(tokens, separators, strict=True)))
    kept = data.draw(st.integers(0, len(tokens) - 1))
    prefix = "".join(map("".join, zip(tokens[:kept], separators[:kept], strict=True)))
    assert not matches(prefix.encode(), expected, mode)
    assert not matches(expected.encode(), prefix, mode)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1), st.sampled_from(MODES))
def test_a_prefix_that_lacks_a_visible_character_never_passes(text: str, mode: Compare) -> None:
    words = text.split()
    assume(words and not any(char.isdigit() for char in text))
    cut = text.rstrip(" \t\n\v\f")[:-1]
    assume(cut.rstrip(" \t\n\v\f") != text.rstrip(" \t\n\v\f"))
    assert not matches(cut.encode(), text, mode)


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=1, max_size=5))
def test_blanks_at_ends_and_line_ends_do_not_count(rows: list[list[str]]) -> None:
    expected = "\n".join(" ".join(row) for row in rows) + "\n"
    loose = " \t\r\n".join("  ".join(row) for row in rows) + " \r\n\r\n"
    assert matches(loose.encode(), expected, "lines")
    assert matches(" ".join(" ".join(row) for row in rows).encode(), expected, "tokens")


@given(st.integers(), st.integers())
def test_integers_are_equal_only_as_they_are(one: int, other: int) -> None:
    assert same_token(str(one), str(other)) == (one == other)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200), st.floats(-1e-7, 1e-7))
def test_close_decimals_are_equal(value: float, gap: float) -> None:
    assert same_token(repr(value + gap), repr(value))


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200))
def test_far_decimals_are_not(value: float) -> None:
    far = value + max(1e-5, abs(value) * 1e-4)
    assert not same_token(repr(far), repr(value))


@pytest.mark.parametrize(
    ("actual", "expected", "lines", "tokens"),
    [
        ("2 \r\n", "2\n", True, True),
        ("2", "2\n", True, True),
        ("2\n\n\n", "2", True, True),
        ("", "", True, True),
        ("", "3", False, False),
        ("3", "", False, False),
        ("1\n2", "1 2", False, True),
        ("1 2", "1\n2", False, True),
        ("1\n\n2", "1\n2", False, True),
        (" 2", "2", True, True),
        ("5", "5 1 0", False, False),
        ("5 1 0 0", "5 1 0", False, False),
        ("0 1 5", "5 1 0", False, False),
        ("007", "7", False, False),
        ("+7", "7", False, False),
        ("-0", "0", False, False),
        ("50000000000000001", "50000000000000000", False, False),
        ("3.0", "3", True, True),
        ("3.0000001", "3", False, False),
        ("3", "3.0", True, True),
        ("3.", "3.0", True, True),
        (".5", "0.5", True, True),
        ("1e3", "1000.0", True, True),
        ("1000000.5", "1000000.0", True, True),
        ("1000002.5", "1000000.0", False, False),
        ("0.333333", "0.3333333333333", True, True),
        ("0.3333", "0.3333333333333", False, False),
        ("-0.0", "0.0", True, True),
        ("1e999999999", "1.0", False, False),
        ("1e999", "1.0", False, False),
        ("0e999", "0.0", True, True),
        ("1_000", "1000.0", False, False),
        ("0x10", "16", False, False),
        ("３", "3", False, False),
        ("٣.٠", "3.0", False, False),
        ("nan", "1.5", False, False),
        ("nan", "nan", True, True),
        ("NaN", "nan", False, False),
        ("inf", "1e400", False, False),
        ("Infinity", "inf", False, False),
        ("yes", "YES", False, False),
        ("a b", "a\u00a0b", False, False),
        ("2\0", "2", False, False),
    ],
)
def test_rules(actual: str, expected: str, lines: bool, tokens: bool) -> None:
    assert matches(actual.encode(), expected, "lines") == lines
    assert matches(actual.encode(), expected, "tokens") == tokens
    assert matches(actual.encode(), expected, "exact") == (actual == expected)


def test_a_difference_is_named_and_short() -> None:
    assert difference(b"1\n2 4\n", "1\n2 3\n", "lines") == "line 2, token 2: got '4', expected '3'"
    said = difference(b"x" * 10_000, "y" * 10_000, "lines")
    assert len(said) < 200
    assert len(difference(b"x" * 10_000, "y" * 10_000, "exact")) < 200


def test_a_hostile_number_costs_the_host_little() -> None:
    line = " ".join(["1e999"] * 20_000)
    assert not matches(line.replace("1e999", "1e998").encode(), line, "lines")


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.booleans()
PLAIN = st.recursive(
    SIMPLE | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.sets(st.integers() | st.text(), max_size=5)
        | st.frozensets(st.integers(), max_size=5)
    ),
    max_leaves=20,
)


def typed(value: object) -> object:
    """A value with the types of all its parts, for an exact comparison."""
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    assert typed(decode(encode(value))) == typed(value)


@given(PLAIN)
def test_a_result_is_the_same_as_itself(value: object) -> None:
    assert same(decode(encode(value)), value)


@given(PLAIN, PLAIN)
@settings(max_examples=200)
def test_no_result_raises(one: object, other: object) -> None:
    assert isinstance(unlike(one, other), str)
    assert len(unlike(one, other)) < 400


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_plain_data_or_are_not(data: bytes) -> None:
    try:
        decode(data)
    except NotPlain:
        return


@pytest.mark.parametrize(
    "data",
    [b"[" * 10_000, b'{"i":"zz"}', b'{"i":[]}', b'{"s":[[1]]}', b'{"d":[[1]]}', b'{"d":[[[],1]]}', b'{"x":1}', b"{}", b'{"i":"1","b":""}', b"9" * 5000, b'{"c":["a",1]}', b'{"t":5}', b'{"b":"0"}', b""],
)  # fmt: skip
def test_forged_data_is_refused(data: bytes) -> None:
    with pytest.raises(NotPlain):
        decode(data)


def test_nothing_but_exact_types_is_encoded() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    cycle: list[object] = []
    cycle.append(cycle)
    for value in (Liar(3), [Liar(3)], object(), iter([]), cycle, print, {1: Liar(2)}, (x for x in [])):
        with pytest.raises(NotPlain):
            encode(value)


@pytest.mark.parametrize(
    ("actual", "expected", "right"),
    [
        ((1, [2]), [1, [2]], True),
        ([1], (1,), True),
        (True, 1, False),
        (1, True, False),
        ([True], [1], False),
        (2, 2.0, True),
        (2.0, 2, True),
        (2.0000001, 2, False),
        (0.1 + 0.2, 0.3, True),
        ([0.1 + 0.2], [0.3], True),
        (10**400, 10**400, True),
        (10**400, 1.0, False),
        (1.0, 10**400, False),
        (float("inf"), float("inf"), True),
        (1e308, float("inf"), False),
        (float("nan"), 1.5, False),
        (math.nan, math.nan, True),
        ({1: 2}, {"1": 2}, True),
        ({1: 2}, {1: 2}, True),
        ({True: 2}, {1: 2}, False),
        ({1: 2, "1": 3}, {"1": 3}, False),
        ({}, [], False),
        ([], None, False),
        (None, None, True),
        (0, None, False),
        ("", None, False),
        ({1, 2}, {2, 1}, True),
        ({1}, [1], False),
        ([1], {1}, False),
        ("1", 1, False),
        (b"a", "a", False),
        ([1, 2], [1], False),
        ([1], [1, 2], False),
    ],
)
def test_results(actual: object, expected: object, right: bool) -> None:
    assert same(actual, expected) == right
