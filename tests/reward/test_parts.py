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
    assert program_of(Task("t", "p", StdinTests(()), starter="print("), "1)")[0] == "print(1)\n"
    assert program_of(Task("t", "p", StdinTests(())), "Here:\n```python\nprint(1)\n```\n")[0] == "print(1)\n"
    assert program_of(Task("t", "p", StdinTests(())), "print(1), I think") == (None, "no code block in the answer")


@pytest.mark.parametrize(
    ("opening", "text", "thinking", "found"),
    [
        ("<think>\n", "easy\n</think>\n```python\nprint(1)\n```", True, "print(1)\n"),
        ("<think>\n", "```python\nprint(1)\n```", False, None),  # it never stopped thinking
        ("<think>\n\n</think>\n\n", "```python\nprint(1)\n```", True, "print(1)\n"),
        ("", "```python\nprint(1)\n```", True, None),  # it was to think and did not
        ("Here it is:\n```python\n", "print(1)\n```\n", False, "print(1)\n"),
    ],
)
def test_what_the_prompt_opened_belongs_to_the_answer(
    opening: str, text: str, thinking: bool, found: str | None
) -> None:
    assert program_of(Task("t", "p", StdinTests(())), opening + text, thinking=thinking)[0] == found
