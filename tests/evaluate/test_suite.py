from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evaluate import answer_of, pass_at_k, suite_result
from engine.types import Task
from sandbox import StdinTests
from tests.conftest import completion, graded


def tasks(*sources: str) -> list[Task]:
    return [Task(f"task-{i}", "", StdinTests(()), source=source) for i, source in enumerate(sources)]


def test_rates_by_problem_and_source_leave_infra_out() -> None:
    answers = [
        graded(completion(0, 0, (1,), (2,)), 1.0),
        graded(completion(0, 1, (1,), (2,), finish="length"), 0.0),
        graded(completion(0, 2, (1,), (2,)), None),
        graded(completion(1, 0, (1,), (2,)), 0.0),
        graded(completion(2, 0, (1,), (2,)), 1.0),
    ]
    result = suite_result("s", tasks("easy", "hard", "hard"), list(map(answer_of, answers)))
    assert result.by_problem == {"task-0": 0.5, "task-1": 0.0, "task-2": 1.0}
    assert result.by_source == {"easy": 0.5, "hard": 0.5}
    assert (result.pass_rate, result.truncated_share, result.infra) == (0.5, 0.2, 1)
    assert result.finished_pass_rate == 2 / 3
    assert result.pass_at == {"pass@1": 0.5}  # two problems have one judged answer
    assert result.verdicts == {"AC": 2, "INFRA": 1, "WA": 2}


def test_a_problem_without_a_judged_answer_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="task-1"):
        suite_result("s", tasks("a", "a"), [answer_of(graded(completion(0, 0, (1,), (2,)), 1.0))])


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(case: tuple[int, int, int]) -> None:
    n, right, k = case
    draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert math.isclose(pass_at_k(n, right, k), sum(map(any, draws)) / len(draws), abs_tol=1e-12)


def test_pass_at_k_of_fewer_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at_k(2, 1, 3)
