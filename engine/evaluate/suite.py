"""The result of one suite: a pass rate for each problem, and what the answers looked like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.types import Graded, SuiteResult, Task


def suite_result(name: str, tasks: Sequence[Task], graded: Sequence[Graded]) -> SuiteResult:
    """Summarise graded answers. Raises ValueError when a problem has no judged answer."""
    outcomes: dict[str, list[float]] = defaultdict(list)
    for item in graded:
        if item.reward is not None:
            outcomes[item.completion.task_id].append(float(item.verdict.verdict == "AC"))
    unjudged = [task.id for task in tasks if not outcomes[task.id]]
    if unjudged:
        raise ValueError(f"suite {name}: no judged answer for {', '.join(unjudged[:5])}")
    by_problem = {task.id: _mean(outcomes[task.id]) for task in tasks}
    sources: dict[str, list[float]] = defaultdict(list)
    for task in tasks:
        sources[task.source].append(by_problem[task.id])
    return SuiteResult(
        name=name,
        pass_rate=_mean(list(by_problem.values())),
        by_problem=by_problem,
        by_source={source: _mean(rates) for source, rates in sorted(sources.items())},
        truncated_share=_mean([float(item.completion.truncated) for item in graded]),
        answers=len(graded),
        infra=sum(item.reward is None for item in graded),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
