"""The result of one suite: a pass rate for each problem, and what the answers looked like."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from engine.types import Answer, Graded, SuiteResult, Task

KS = (1, 2, 4, 5, 8, 10, 16, 25, 32, 50, 64, 100)
"""The k of pass@k that are shown, as far as there are samples."""


def answer_of(graded: Graded) -> Answer:
    """What an evaluation keeps of a graded completion."""
    completion, verdict = graded.completion, graded.verdict
    return Answer(
        task_id=completion.task_id,
        sample=completion.member,
        verdict=verdict.verdict,
        passed=verdict.passed,
        total=verdict.total,
        finish=completion.finish,
        tokens=len(completion.token_ids),
        detail=verdict.detail,
        text=completion.text,
    )


def suite_result(name: str, tasks: Sequence[Task], answers: Sequence[Answer]) -> SuiteResult:
    """Summarise answers. INFRA counts in no rate. Raises ValueError when a problem has no judged answer."""
    judged: Mapping[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.verdict != "INFRA":
            judged[answer.task_id].append(answer)
    unjudged = [task.id for task in tasks if not judged[task.id]]
    if unjudged:
        raise ValueError(f"suite {name}: no judged answer for {', '.join(unjudged[:5])}")
    counts = {task.id: (len(judged[task.id]), _right(judged[task.id])) for task in tasks}
    by_problem = {task: right / of for task, (of, right) in counts.items()}
    sources: dict[str, list[float]] = defaultdict(list)
    for task in tasks:
        sources[task.source].append(by_problem[task.id])
    counted = [answer for task in tasks for answer in judged[task.id]]
    finished = [answer for answer in counted if answer.finish != "length"]
    fewest = min(of for of, _ in counts.values())
    return SuiteResult(
        name=name,
        pass_rate=_mean(list(by_problem.values())),
        by_problem=by_problem,
        by_source={source: _mean(rates) for source, rates in sorted(sources.items())},
        truncated_share=_mean([float(answer.finish == "length") for answer in answers]),
        answers=len(answers),
        infra=len(answers) - len(counted),
        pass_at={f"pass@{k}": _mean([pass_at_k(*c, k) for c in counts.values()]) for k in KS if k <= fewest},
        finished_pass_rate=_right(finished) / len(finished) if finished else 0.0,
        mean_tokens=_mean([float(answer.tokens) for answer in counted]),
        verdicts=dict(sorted(Counter(answer.verdict for answer in answers).items())),
    )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k samples passes, without bias: 1 - C(n-c, k) / C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1, as a product that neither
    overflows nor cancels. Raises ValueError for k above the samples.
    """
    if not 0 < k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be between 1 and the samples")
    if samples - right < k:
        return 1.0
    missed = 1.0
    for i in range(samples - right + 1, samples + 1):
        missed *= 1 - k / i
    return 1 - missed


def _right(answers: Sequence[Answer]) -> int:
    return sum(answer.verdict == "AC" for answer in answers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
