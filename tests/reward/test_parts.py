from __future__ import annotations

import pytest

from engine.reward import reward_of
from engine.reward.grader import program_of
from engine.types import Task
from sandbox import StdinTests, Verdict

WEIGHTS = {"passed": 0.5, "share": 0.4, "format": 0.1}


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict("AC", 4, 4), 1.0),
        (Verdict("WA", 1, 4), 0.2),
        (Verdict("TLE", 3, 4), 0.4),
        (Verdict("CE", 0, 4), 0.0),
        (Verdict("NO_CODE", 0, 1), 0.0),
        (Verdict("RE", 0, 4), 0.1),
    ],
)
def test_the_reward_is_the_weighted_sum_of_its_parts(verdict: Verdict, expected: float) -> None:
    reward, parts = reward_of(verdict, WEIGHTS)
    assert reward == pytest.approx(expected)
    assert reward == pytest.approx(sum(WEIGHTS[name] * value for name, value in parts.items()))


def test_infra_is_no_reward() -> None:
    assert reward_of(Verdict("INFRA", 4, 4), WEIGHTS) == (None, {})


def test_the_starter_begins_the_program_and_fences_hold_it_otherwise() -> None:
    assert program_of(Task("t", "p", StdinTests(()), starter="print("), "1)") == "print(1)\n"
    assert program_of(Task("t", "p", StdinTests(())), "Here:\n```python\nprint(1)\n```\n") == "print(1)\n"
    assert program_of(Task("t", "p", StdinTests(())), "print(1), I think") is None
