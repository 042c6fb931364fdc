"""The best split of more and more devices between samplers and trainers, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.plan.outcome import WORTH, Outcome, Verdict, judge, outcome
from engine.plan.simulate import Phases, Setup

SIZES = (2, 4, 8, 16, 64, 256, 1024)
"""Devices of the table."""
SAME = 0.01
"""Of the best split's tokens a second: one that gives almost as many on fewer devices is better."""


@dataclass(frozen=True, slots=True)
class Row:
    """What so many devices come to."""

    gpus: int
    verdict: Verdict | None
    """Of the best split; None where there are too few devices for a sampler and a trainer."""
    unused: int
    """Devices that the best split has no work for."""


def table(
    setup: Setup,
    phases_of: Callable[[Setup], Phases],
    *,
    tensor_parallel: int,
    graders_for: Callable[[int], int],
    sizes: Sequence[int] = SIZES,
) -> list[Row]:
    """The best split for each size; the setup says all but samplers, trainers and graders.

    graders_for: programs judged at once with so many devices.
    """
    known: dict[Setup, Outcome] = {}
    verdicts: dict[Setup, Verdict] = {}
    most_graders = (setup.prompts_per_step * (1 + setup.max_lag) + setup.oversample) * setup.group_size
    rows = []
    for gpus in sizes:
        base = replace(setup, graders=min(graders_for(gpus), most_graders))
        tried = [replace(base, samplers=s, trainers=t) for s, t in splits(gpus, base, tensor_parallel)]
        if not tried:
            rows.append(Row(gpus, None, gpus))
            continue
        known |= {one: outcome(one, phases_of(one)) for one in tried if one not in known}
        most = max(known[one].tokens_per_second for one in tried)
        enough = [one for one in tried if known[one].tokens_per_second >= most * (1 - SAME)]
        best = min(enough, key=lambda one: one.samplers * tensor_parallel + one.trainers)
        if best not in verdicts:
            verdicts[best] = judge(best, phases_of)
        rows.append(Row(gpus, verdicts[best], gpus - best.samplers * tensor_parallel - best.trainers))
    return rows


def splits(gpus: int, setup: Setup, tensor_parallel: int) -> list[tuple[int, int]]:
    """Samplers and trainers to try: a power of two on either side, the rest on the other.

    None beyond what has work: a group goes whole to one sampler, and a completion to one trainer.
    """
    most_samplers = setup.prompts_per_step * (1 + setup.max_lag) + setup.oversample
    most_trainers = setup.prompts_per_step * setup.group_size
    sizes = [1 << power for power in range(11) if 1 << power <= gpus]
    pairs = {(n, gpus - n * tensor_parallel) for n in sizes} | {((gpus - n) // tensor_parallel, n) for n in sizes}
    # The sides beyond their most have fewer devices, so that the others may have more.
    pairs |= {(most_samplers, gpus - most_samplers * tensor_parallel)}
    pairs |= {((gpus - most_trainers) // tensor_parallel, most_trainers)}
    pairs |= {(n, m) for n, m in ((most_samplers, t) for t in sizes) if n * tensor_parallel + m <= gpus}
    return sorted({(min(s, most_samplers), min(t, most_trainers)) for s, t in pairs if s > 0 and t > 0})


def enough(rows: Sequence[Row]) -> int | None:
    """The size from which no larger one gives WORTH more tokens a second; None where the largest still does."""
    known = [(row.gpus, row.verdict.outcome.tokens_per_second) for row in rows if row.verdict is not None]
    for index, (gpus, tokens) in enumerate(known[:-1]):
        if all(later < tokens * (1 + WORTH) for _, later in known[index + 1 :]):
            return gpus
    return None
