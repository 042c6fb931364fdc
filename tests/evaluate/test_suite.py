from __future__ import annotations

import pytest

from engine.evaluate import suite_result
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
    result = suite_result("s", tasks("easy", "hard", "hard"), answers)
    assert result.by_problem == {"task-0": 0.5, "task-1": 0.0, "task-2": 1.0}
    assert result.by_source == {"easy": 0.5, "hard": 0.5}
    assert (result.pass_rate, result.truncated_share, result.infra) == (0.5, 0.2, 1)


def test_a_problem_without_a_judged_answer_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="task-1"):
        suite_result("s", tasks("a", "a"), [graded(completion(0, 0, (1,), (2,)), 1.0)])
