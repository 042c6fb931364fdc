"""Generated tasks: small programs on two integers, in families of graded difficulty with one parameter each.

A family is a sentence, an expression and a function; its parameters are split once and for all into trained and
held-out ones, and a few families are held out whole. Everything follows from the family's name and the parameter,
so two machines make the same tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import InputError
from engine.types import Task
from sandbox import StdinCase, StdinTests

STARTER = "a, b = map(int, input().split())\nprint("
SPLITS = ("train", "heldout-parameters", "heldout-families")


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task: `statement` and `expression` hold {k}, `value` computes what is printed."""

    name: str
    level: int
    """1: one operation; 2: two; 3: a composition that needs a choice or a loop."""
    statement: str
    expression: str
    value: Callable[[int, int, int], object]
    parameters: Sequence[int]
    heldout: bool = False


def _digits(n: int) -> int:
    return sum(int(d) for d in str(abs(n)))


SMALL = range(2, 14)
LARGE = range(15, 75, 5)

FAMILIES: tuple[Family, ...] = (
    Family("sub", 1, "a minus {k}", "a - {k}", lambda a, b, k: a - k, LARGE),
    Family("add", 1, "b plus {k}", "b + {k}", lambda a, b, k: b + k, LARGE),
    Family("mul", 1, "{k} times b", "{k} * b", lambda a, b, k: k * b, SMALL),
    Family("rsub", 1, "{k} minus a", "{k} - a", lambda a, b, k: k - a, LARGE),
    Family("larger", 1, "the maximum of a and {k}", "max(a, {k})", lambda a, b, k: max(a, k), LARGE),
    Family("smaller", 1, "the minimum of b and {k}", "min(b, {k})", lambda a, b, k: min(b, k), LARGE),
    Family("mod", 1, "a modulo {k}", "a % {k}", lambda a, b, k: a % k, SMALL),
    Family("div", 1, "b divided by {k}, rounded down", "b // {k}", lambda a, b, k: b // k, SMALL),
    Family("sum3", 1, "the sum of a, b and {k}", "a + b + {k}", lambda a, b, k: a + b + k, LARGE),
    Family("prod3", 1, "the product of a, b and {k}", "a * b * {k}", lambda a, b, k: a * b * k, SMALL),
    Family("distance", 2, "the absolute value of a minus {k}", "abs(a - {k})", lambda a, b, k: abs(a - k), LARGE),
    Family("subsum", 2, "a minus b, plus {k}", "a - b + {k}", lambda a, b, k: a - b + k, LARGE),
    Family("muladd", 2, "a times b, plus {k}", "a * b + {k}", lambda a, b, k: a * b + k, LARGE),
    Family("mulsub", 2, "{k} times a, minus b", "{k} * a - b", lambda a, b, k: k * a - b, SMALL),
    Family("mulsum", 2, "{k} times the sum of a and b", "{k} * (a + b)", lambda a, b, k: k * (a + b), SMALL),
    Family("muldiff", 2, "{k} times the difference a minus b", "{k} * (a - b)", lambda a, b, k: k * (a - b), SMALL),
    Family("square", 2, "the square of a, plus {k}", "a ** 2 + {k}", lambda a, b, k: a**2 + k, LARGE),
    Family("summod", 2, "the sum of a and b, modulo {k}", "(a + b) % {k}", lambda a, b, k: (a + b) % k, SMALL),
    Family("prodmod", 2, "the product of a and b, modulo {k}", "a * b % {k}", lambda a, b, k: a * b % k, SMALL),
    Family("sumdiv", 2, "the sum of a and b divided by {k}, rounded down", "(a + b) // {k}", lambda a, b, k: (a + b) // k, SMALL),
    Family("largeradd", 2, "{k} plus the maximum of a and b", "{k} + max(a, b)", lambda a, b, k: k + max(a, b), LARGE),
    Family("smallermul", 2, "{k} times the minimum of a and b", "{k} * min(a, b)", lambda a, b, k: k * min(a, b), SMALL),
    Family("largest3", 2, "the maximum of a, b and {k}", "max(a, b, {k})", lambda a, b, k: max(a, b, k), LARGE),
    Family("smallest3", 2, "the minimum of a, b and {k}", "min(a, b, {k})", lambda a, b, k: min(a, b, k), LARGE),
    Family("spread", 3, "the absolute value of a minus b, times {k}", "abs(a - b) * {k}", lambda a, b, k: abs(a - b) * k, SMALL),
    Family("closer", 3, "the maximum of a minus {k} and zero", "max(a - {k}, 0)", lambda a, b, k: max(a - k, 0), LARGE),
    Family("squares", 2, "the square of a minus {k} times b", "a ** 2 - {k} * b", lambda a, b, k: a**2 - k * b, SMALL),
    Family("repeat", 3, "the string of a, {k} times", "str(a) * {k}", lambda a, b, k: str(a) * k, SMALL),
    Family("capped", 3, "the minimum of a minus b and {k}", "min(a - b, {k})", lambda a, b, k: min(a - b, k), LARGE),
    Family("farther", 3, "the maximum of {k} times a and b", "max({k} * a, b)", lambda a, b, k: max(k * a, b), SMALL),
    Family("above", 3, "whether a is larger than {k}", "a > {k}", lambda a, b, k: a > k, LARGE),
    Family("divides", 3, "whether a modulo {k} is 0", "a % {k} == 0", lambda a, b, k: a % k == 0, SMALL),
    Family("cube", 2, "the cube of a, minus {k}", "a ** 3 - {k}", lambda a, b, k: a**3 - k, LARGE, heldout=True),
    Family("diffmod", 2, "the difference a minus b, modulo {k}", "(a - b) % {k}", lambda a, b, k: (a - b) % k, SMALL, heldout=True),
    Family("smalleradd", 2, "{k} plus the minimum of a and b", "{k} + min(a, b)", lambda a, b, k: k + min(a, b), LARGE, heldout=True),
    Family("below", 3, "whether b is smaller than {k}", "b < {k}", lambda a, b, k: b < k, LARGE, heldout=True),
)  # fmt: skip

_SHOTS = (
    ("the sum of a and 7", "a + 7"),
    ("the maximum of a and 30", "max(a, 30)"),
    ("b plus 1, modulo 9", "(b + 1) % 9"),
)
HEADER = "".join(f"# Print {statement}.\n{STARTER}{expression})\n\n" for statement, expression in _SHOTS)


def generated(split: str) -> list[Task]:
    """The tasks of a split: `train`, `heldout-parameters` (trained families, other parameters) or `heldout-families`.

    Raises InputError for another name.
    """
    if split not in SPLITS:
        raise InputError(
            f"tasks source generated:{split} is unknown; known: {', '.join(f'generated:{s}' for s in SPLITS)}"
        )
    return [
        _task(family, k)
        for family in FAMILIES
        for i, k in enumerate(family.parameters)
        if split == _split_of(family, i)
    ]


def _split_of(family: Family, i: int) -> str | None:
    if family.heldout:
        return "heldout-families" if i % 3 == 0 else None
    return "heldout-parameters" if i % 6 == 2 else "train"


def _task(family: Family, k: int) -> Task:
    statement, expression = family.statement.format(k=k), family.expression.format(k=k)
    cases = tuple(
        StdinCase(f"{a} {b}\n", f"{family.value(a, b, k)}\n")
        for a, b in _inputs(random.Random(f"{family.name}/{k}"), k)
    )
    return Task(
        id=f"generated/{family.name}/{k}",
        prompt=f"{HEADER}# Print {statement}.\n{STARTER}",
        starter=STARTER,
        tests=StdinTests(cases),
        reference=f"{STARTER}{expression})\n",
        source=f"generated/level-{family.level}",
    )


def _inputs(rng: random.Random, k: int) -> list[tuple[int, int]]:
    """Distinct pairs on both sides of k, on its multiples and on it, so that few wrong expressions pass many cases."""
    below, above, any_of = range(1, k), range(k + 1, 2 * k + 20), range(1, 100)
    multiples = range(2 * k, 7 * k, k)
    patterns = [
        (below, above), (above, below), (above, above), (below, below),
        (multiples, any_of), (any_of, multiples), (range(k, k + 1), any_of), (any_of, any_of),
    ]  # fmt: skip
    pairs: list[tuple[int, int]] = []
    for first, second in patterns:
        pair = (rng.choice(first), rng.choice(second))
        while pair in pairs:
            pair = (rng.choice(any_of), rng.choice(any_of))
        pairs.append(pair)
    return pairs
