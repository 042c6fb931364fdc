"""What a simulated run comes to: seconds a step, idle shares, queues, and which stage holds the others up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.plan.simulate import Phases, Setup, Step, Trace, simulate

GROUPS, STEPS = 64, 12
"""At the least, of the steps that are averaged: enough for the lengths' tail to be in them."""
WORTH = 0.05
"""A gain in tokens a second below which a change isn't worth naming."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mean of a run's steps once it has its rhythm."""

    step_seconds: float
    """From one step's end to the next."""
    tokens_per_second: float
    """Sampled."""
    sampler_idle_share: float
    """Of the samplers' time in which they decode nothing, pauses for a sync among it."""
    trainer_idle_share: float
    """Of the trainer's time that it waits for groups."""
    grader_busy_share: float
    grader_queue_mean: float
    """Groups that are sampled whole and not graded, over time."""
    grader_queue_max: int
    trainer_queue_mean: float
    """Groups that are graded and not taken, over time."""
    trainer_queue_max: int
    sample_seconds: float
    """Of a step: what the trainer waits for the last completion. This and the next three are as in metrics.jsonl."""
    grade_seconds: float
    train_seconds: float
    sync_seconds: float
    lag_max: int
    """Versions that the oldest trained group was behind."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A setup's outcome and what stands in its way."""

    setup: Setup
    outcome: Outcome
    bottleneck: str
    """samplers, graders, trainer, sync, driver; batch where the step's own size leaves more devices without work."""
    advice: str
    """What to change, a sentence."""


def steps_for(setup: Setup) -> int:
    """Steps to simulate: the first and the last of them, while the pipeline fills and empties, are not averaged."""
    return max(STEPS, -(-GROUPS // setup.prompts_per_step)) + 1 + 2 * setup.max_lag


def outcome(setup: Setup, phases: Phases) -> Outcome:
    """Simulate and average."""
    trace = simulate(setup, phases, steps_for(setup))
    return average(setup, trace, 1 + setup.max_lag, len(trace.steps) - setup.max_lag)


def average(setup: Setup, trace: Trace, first: int, last: int) -> Outcome:
    """The mean of the steps from `first`, counted from 0, up to `last`, which is left out."""
    steps, before = trace.steps[first:last], trace.steps[first - 1] if first else None
    start, end = before.end if before else 0.0, steps[-1].end
    span = max(end - start, 1e-12)
    busy = steps[-1].sampler_busy_seconds - (before.sampler_busy_seconds if before else 0.0)
    waited, phases = _total(steps, lambda s: s.taken - s.asked), _total(steps, lambda s: s.synced - s.asked)
    sampled = [g for g in trace.groups if g.left == 0]
    grading = [(g.landed, g.ready) for g in sampled]
    untaken = [(g.ready, end if g.taken is None else g.taken) for g in sampled]
    return Outcome(
        step_seconds=span / len(steps),
        tokens_per_second=sum(step.tokens for step in steps) / span,
        sampler_idle_share=min(1.0, max(0.0, 1 - busy / span / setup.samplers)),
        trainer_idle_share=waited / max(phases, 1e-12),
        grader_busy_share=_overlap(trace.grading, start, end) / span / setup.graders,
        grader_queue_mean=_overlap(grading, start, end) / span,
        grader_queue_max=_most(grading, start, end),
        trainer_queue_mean=_overlap(untaken, start, end) / span,
        trainer_queue_max=_most(untaken, start, end),
        sample_seconds=_total(steps, lambda s: s.landed - s.asked) / len(steps),
        grade_seconds=_total(steps, lambda s: s.taken - s.landed) / len(steps),
        train_seconds=_total(steps, lambda s: s.trained - s.taken) / len(steps),
        sync_seconds=_total(steps, lambda s: s.synced - s.trained) / len(steps),
        lag_max=max(step.oldest for step in steps),
    )


def judge(setup: Setup, phases_of: Callable[[Setup], Phases]) -> Verdict:
    """The outcome, the stage whose halved time would save the most, and the change that would help the most."""
    phases = phases_of(setup)
    now = outcome(setup, phases)
    faster = {stage: outcome(setup, halved(phases, stage)).step_seconds for stage in STAGES}
    slowest = min(faster, key=lambda stage: faster[stage])
    gains = {
        said: outcome(changed, phases_of(changed)).tokens_per_second / now.tokens_per_second - 1
        for said, changed in _changes(setup).items()
    }
    counts = {"samplers": setup.samplers, "graders": setup.graders, "trainer": setup.trainers}
    more = f"{2 * counts[slowest]} {slowest.removesuffix('s')}s" if slowest in counts else ""
    helped = gains.get(more, 1.0) >= WORTH
    bottleneck = slowest if helped or slowest == "graders" else "batch"
    return Verdict(setup, now, bottleneck, _advice(setup, slowest, helped, gains))


STAGES = ("samplers", "graders", "trainer", "sync", "driver")


def halved(phases: Phases, stage: str) -> Phases:
    """The same with one of STAGES twice as fast."""
    names = {
        "samplers": ("decode_seconds", "decode_sequence_seconds", "prefill_token_seconds"),
        "graders": ("grade_seconds",),
        "trainer": ("train_token_seconds", "train_step_seconds", "exchange_seconds"),
        "sync": ("sync_seconds",),
        "driver": ("landing_seconds", "record_seconds"),
    }[stage]
    return replace(phases, **{name: getattr(phases, name) / 2 for name in names})


def _changes(setup: Setup) -> dict[str, Setup]:
    """What could be changed, by what it is called."""
    changes = {
        f"{2 * setup.samplers} samplers": replace(setup, samplers=2 * setup.samplers),
        f"{2 * setup.graders} graders": replace(setup, graders=2 * setup.graders),
        f"{2 * setup.trainers} trainers": replace(setup, trainers=2 * setup.trainers),
        f"rollout.prompts_per_step = {2 * setup.prompts_per_step}": replace(
            setup, prompts_per_step=2 * setup.prompts_per_step
        ),
    }
    if setup.max_lag == 0:
        changes["rollout.max_lag = 1"] = replace(setup, max_lag=1)
    return changes


def _advice(setup: Setup, slowest: str, helped: bool, gains: dict[str, float]) -> str:
    """helped: whether more of the slowest would."""
    best = max(gains, key=lambda said: gains[said])
    work = f"{setup.prompts_per_step} prompts x {setup.group_size} a step"
    why = {
        "samplers": f"{work} leave more samplers without work; ",
        "trainer": f"{work} leave more trainers without work; ",
        "graders": "one program's own time is waited for, which more graders don't shorten; ",
    }
    if gains[best] < WORTH:
        return f"none of {', '.join(gains)} would give {100 * WORTH:.0f} % more tokens a second"
    return f"{'' if helped else why[slowest]}{best} would give {1 + gains[best]:.2f} times the tokens a second"


def _total(steps: Sequence[Step], seconds: Callable[[Step], float]) -> float:
    return sum(map(seconds, steps))


def _overlap(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How much of the spans, added up, lies between start and end."""
    return sum(max(0.0, min(end, to) - max(start, since)) for since, to in spans)


def _most(spans: Sequence[tuple[float, float]], start: float, end: float) -> int:
    """The most spans that hold at once between start and end; those of no length count for nothing."""
    edges = sorted(
        edge for since, to in spans if to > since and to > start and since < end for edge in ((since, 1), (to, -1))
    )
    most, now = 0, 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most
