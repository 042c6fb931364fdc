"""The simulation against runs that a person can add up, and against `engine.pipeline.Ahead` itself."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pipeline import Ahead, Finished
from engine.plan.outcome import halved, judge, outcome
from engine.plan.simulate import SYNC_STEPS, Phases, Setup, Trace, simulate, train_seconds

ONE = Setup(samplers=1, trainers=1, graders=8, prompts_per_step=2, group_size=4)
TENTHS = Phases(
    decode_seconds=0.01, decode_sequence_seconds=0.0, lengths=((100,) * 8,), grade_seconds=0.5,
    train_token_seconds=0.0, train_step_seconds=0.25, sync_seconds=0.125,
)  # fmt: skip
"""100 tokens at 10 ms: a second of sampling, whatever is sampled together."""


def flaws(setup: Setup, trace: Trace) -> list[str]:
    """What breaks the pipeline's promises: every group is trained, dropped or in flight; none trained is too old."""
    found = []
    for version, step in enumerate(trace.steps):
        taken = [g for g in trace.groups if g.taken is not None and step.asked <= g.taken <= step.taken]
        if len(taken) - sum(g.dropped for g in taken) < setup.prompts_per_step + setup.oversample:
            found.append(f"step {version} has {len(taken)} groups")
        if step.oldest > setup.max_lag:
            found.append(f"step {version} trains a group {step.oldest} versions old")
        if version and step.asked != trace.steps[version - 1].end:
            found.append(f"step {version} does not begin where the one before ended")
        if any(g.ready > step.taken + 1e-9 for g in taken):
            found.append(f"step {version} takes a group that is not graded")
        submitted = sum(g.submitted_version <= version and not g.dropped for g in trace.groups)
        discarded = setup.oversample * version
        most = setup.prompts_per_step * min(version + 1 + setup.max_lag, len(trace.steps)) + setup.oversample
        if submitted - discarded > most:
            found.append(f"{submitted} groups are submitted at version {version}, {most} may be")
    trained = sum(g.taken is not None and not g.dropped for g in trace.groups)
    per_step = setup.prompts_per_step + setup.oversample
    if trained != per_step * len(trace.steps):
        found.append(f"{trained} groups are trained in {len(trace.steps)} steps")
    return found


def test_at_lag_0_a_step_is_the_sum_of_its_phases() -> None:
    found = outcome(ONE, TENTHS)
    assert found.step_seconds == pytest.approx(1.0 + 0.5 + 0.25 + 0.125)
    phases = (found.sample_seconds, found.grade_seconds, found.train_seconds, found.sync_seconds)
    assert phases == pytest.approx((1.0, 0.5, 0.25, 0.125))
    assert found.tokens_per_second == pytest.approx(800 / 1.875)
    assert found.sampler_idle_share == pytest.approx(1 - 1 / 1.875)
    assert found.trainer_idle_share == pytest.approx(1.5 / 1.875)
    assert found.grader_busy_share == pytest.approx(0.5 / 1.875)
    assert (found.grader_queue_max, found.trainer_queue_max, found.lag_max) == (2, 0, 0)
    assert found.grader_queue_mean == pytest.approx(2 * 0.5 / 1.875)


def test_at_lag_1_with_equal_times_nobody_waits_after_the_first_step() -> None:
    equal = replace(TENTHS, grade_seconds=0.0, train_step_seconds=1.0, sync_seconds=0.0)
    found = outcome(replace(ONE, max_lag=1), equal)
    assert found.step_seconds == pytest.approx(1.0)
    assert found.sampler_idle_share == pytest.approx(0.0, abs=1e-9)
    assert found.trainer_idle_share == pytest.approx(0.0, abs=1e-9)
    assert found.lag_max == 1
    alternating = outcome(ONE, equal)
    assert alternating.step_seconds == pytest.approx(2.0)


def test_sequences_slow_an_engine_step_and_short_ones_free_it() -> None:
    phases = replace(TENTHS, lengths=((50, 100, 100, 100),), decode_sequence_seconds=0.01)
    trace = simulate(replace(ONE, prompts_per_step=1), phases, 1)
    # Fifty steps of four sequences, then fifty of three.
    assert trace.steps[0].landed == pytest.approx(50 * (0.01 + 0.04) + 50 * (0.01 + 0.03))


def test_what_a_sampler_has_no_room_for_waits() -> None:
    trace = simulate(ONE, replace(TENTHS, max_sequences=4), 1)
    assert trace.steps[0].landed == pytest.approx(2.0)


def test_a_prompt_is_read_once_for_its_group_and_again_after_a_sync() -> None:
    phases = replace(TENTHS, prompt_tokens=10, prefill_token_seconds=0.01)
    assert simulate(ONE, phases, 1).steps[0].landed == pytest.approx(1.0 + 2 * 10 * 0.01)
    # The sync finds four sequences half done, whose tokens are read again.
    half = Setup(samplers=1, trainers=1, graders=4, prompts_per_step=1, group_size=4, max_lag=1)
    phases = Phases(0.01, 0.0, ((50,) * 4, (100,) * 4), 0.0, 0.0, sync_seconds=1.0)
    phases = replace(phases, prefill_token_seconds=0.001)
    trace = simulate(half, phases, 2)
    assert trace.steps[0].taken == pytest.approx(0.5)
    assert trace.steps[1].landed == pytest.approx(0.5 + 1.0 + 4 * 50 * 0.001 + 0.5)


def test_a_prompt_that_a_sync_interrupts_is_read_again_whole() -> None:
    setup = Setup(samplers=1, trainers=1, graders=4, prompts_per_step=1, group_size=4, max_lag=1)
    phases = Phases(0.01, 0.0, ((100,) * 4,), 0.0, 0.0, train_step_seconds=0.25, sync_seconds=0.5, max_sequences=4)
    trace = simulate(setup, replace(phases, prompt_tokens=10, prefill_token_seconds=0.1), 2)
    # A second of reading and one of sampling; the next prompt's reading is a quarter done when the sync comes.
    assert trace.steps[0].taken == pytest.approx(2.0)
    assert trace.steps[1].landed == pytest.approx(2.0 + 0.25 + 0.5 + 1.0 + 1.0)
    assert trace.steps[1].sampler_busy_seconds == pytest.approx(4.25)


def test_a_group_goes_to_the_sampler_that_owes_least() -> None:
    setup = Setup(samplers=2, trainers=1, graders=4, prompts_per_step=1, group_size=4, max_lag=1)
    phases = Phases(0.01, 0.0, ((1000,) * 4, (100,) * 4), 0.0, 0.0, max_sequences=4)
    groups = simulate(setup, replace(phases, lengths=((1000,) * 4, (100,) * 4, (100,) * 4)), 3).groups
    # The second sampler is through with its group at 1 s; the third is submitted after a sync that waits for the first.
    assert [groups[n].landed for n in (1, 2)] == pytest.approx([1.0, 2.0 + SYNC_STEPS * 0.01])


def test_a_slow_grader_is_named_and_more_of_them_are_the_advice() -> None:
    slow = replace(ONE, graders=1, max_lag=1)
    found = judge(slow, lambda _: TENTHS)
    assert found.bottleneck == "graders"
    assert found.outcome.step_seconds == pytest.approx(8 * 0.5)
    assert found.outcome.grader_busy_share == pytest.approx(1.0)
    assert found.advice.startswith("2 graders would give")


@pytest.mark.parametrize(
    ("stage", "changed"),
    [
        ("samplers", {"decode_sequence_seconds": 0.1}),
        ("trainer", {"train_token_seconds": 0.1}),
        ("sync", {"sync_seconds": 9.0}),
        ("driver", {"record_seconds": 2.0}),
    ],
)
def test_the_slowest_stage_is_named(stage: str, changed: dict[str, float]) -> None:
    assert judge(ONE, lambda _: replace(TENTHS, **changed)).bottleneck == stage


def test_a_batch_that_is_too_small_for_more_samplers_is_named() -> None:
    found = judge(replace(ONE, prompts_per_step=1), lambda _: replace(TENTHS, grade_seconds=0.0))
    assert found.bottleneck == "batch"
    assert "leave more samplers without work" in found.advice


def test_twice_the_samplers_halve_the_sampling_where_sequences_are_what_costs() -> None:
    phases = replace(TENTHS, decode_seconds=1e-9, decode_sequence_seconds=0.01)
    one, two = (outcome(replace(ONE, samplers=n), phases) for n in (1, 2))
    assert two.sample_seconds == pytest.approx(one.sample_seconds / 2)


def test_a_completion_is_never_split_between_trainers() -> None:
    phases = replace(TENTHS, train_token_seconds=0.01, exchange_seconds=0.5)
    groups = ((100, 100, 100, 300),)
    seconds = [train_seconds(replace(ONE, trainers=n), phases, groups) for n in (1, 2, 100)]
    assert seconds == pytest.approx([6.0 + 0.25, 3.0 + 0.25 + 0.5, 3.0 + 0.25 + 0.5])


def test_the_driver_takes_completions_one_at_a_time() -> None:
    phases = replace(TENTHS, landing_seconds=0.1, record_seconds=0.01, grade_seconds=0.0)
    step = simulate(ONE, phases, 1).steps[0]
    assert step.landed == pytest.approx(1.0 + 8 * 0.1)
    assert step.end - step.synced == pytest.approx(8 * 0.01)


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_groups_are_submitted_as_the_run_submits_them(lag: int, extra: int) -> None:
    """The run's own `Ahead`, with groups that are finished at once, against the simulation's count at each version."""
    steps, per_step = 6, 3
    asked: dict[int, int] = {}
    version = 0

    def submit(count: int) -> list[Future[Finished]]:
        asked[version] = asked.get(version, 0) + count
        futures: list[Future[Finished]] = [Future() for _ in range(count)]
        for future in futures:
            member = SimpleNamespace(completion=SimpleNamespace(version=version))
            future.set_result(Finished([member], 0.0))  # type: ignore[list-item]
        return futures

    ahead = Ahead(submit, per_step=per_step, steps=steps, max_lag=lag, extra=extra)
    for version in range(steps):
        ahead.take(per_step + extra, version)
        ahead.discard(extra)
    setup = replace(ONE, prompts_per_step=per_step, max_lag=lag, oversample=extra)
    groups = simulate(setup, TENTHS, steps).groups
    ours = {v: sum(g.submitted_version == v for g in groups) for v in range(steps)}
    assert {v: n for v, n in ours.items() if n} == asked


lengths = st.lists(st.tuples(*[st.integers(1, 60)] * 4), min_size=1, max_size=8).map(tuple)
setups = st.builds(
    Setup, samplers=st.integers(1, 5), trainers=st.integers(1, 4), graders=st.integers(1, 6),
    prompts_per_step=st.integers(1, 5), group_size=st.just(4), max_lag=st.integers(0, 3), oversample=st.integers(0, 2),
)  # fmt: skip
seconds = st.floats(0.0, 0.5)
phases = st.builds(
    Phases, decode_seconds=st.floats(1e-4, 0.05), decode_sequence_seconds=st.floats(0.0, 0.01), lengths=lengths,
    grade_seconds=seconds, train_token_seconds=st.floats(0.0, 0.01), train_step_seconds=seconds, sync_seconds=seconds,
    max_sequences=st.integers(1, 40), prompt_tokens=st.integers(0, 20), prefill_token_seconds=st.floats(0.0, 0.001),
    landing_seconds=st.floats(0.0, 0.05), record_seconds=st.floats(0.0, 0.01),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(setups, phases)
def test_no_group_is_lost_or_too_old(setup: Setup, phases: Phases) -> None:
    assert flaws(setup, simulate(setup, phases, 7)) == []


@settings(max_examples=150, deadline=None)
@given(setups, phases)
def test_a_run_takes_no_less_than_any_stage_has_to_do(setup: Setup, phases: Phases) -> None:
    setup = replace(setup, oversample=0)
    trace = simulate(setup, phases, 7)
    groups = [g for g in trace.groups if g.taken is not None and not g.dropped]
    completions, tokens = sum(len(g.lengths) for g in groups), sum(sum(g.lengths) for g in groups)
    serial = sum(s.end - s.taken for s in trace.steps)
    full = phases.decode_sequence_seconds + phases.decode_seconds / phases.max_sequences
    bounds = {
        "trainer and sync": serial,
        "sync": 7 * phases.sync_seconds,
        "graders": completions * phases.grade_seconds / setup.graders,
        "samplers": tokens * full / setup.samplers,
        "driver": completions * phases.landing_seconds,
    }
    for name, bound in bounds.items():
        assert trace.steps[-1].end >= bound * (1 - 1e-9), name


@settings(max_examples=100, deadline=None)
@given(setups, phases, st.integers(1, 60))
def test_more_samplers_are_never_slower(setup: Setup, phases: Phases, length: int) -> None:
    """Of completions that are all as long: else a group may fall on a sampler with longer ones, as in a run."""
    phases = replace(phases, lengths=((length,) * 4,), prefill_token_seconds=0.0)
    setup = replace(setup, max_lag=0, oversample=0)
    ends = [simulate(replace(setup, samplers=n), phases, 5).steps[-1].end for n in (1, 2, 4, 8)]
    for fewer, more in pairwise(ends):
        assert more <= fewer * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(setups, phases)
def test_more_samplers_hardly_slow_any_run(setup: Setup, phases: Phases) -> None:
    """With other lengths the order in which groups end may cost some of a step: 4 % in 4,500 random setups."""
    phases = replace(phases, prefill_token_seconds=0.0)
    steps = [outcome(replace(setup, samplers=n, oversample=0), phases).step_seconds for n in (1, 2, 4, 8)]
    for fewer, more in pairwise(steps):
        assert more <= fewer * 1.15


@settings(max_examples=60, deadline=None)
@given(setups, phases, st.sampled_from(["samplers", "graders", "trainer", "sync", "driver"]))
def test_at_lag_0_a_faster_stage_slows_nothing(setup: Setup, phases: Phases, stage: str) -> None:
    setup = replace(setup, max_lag=0, samplers=1)
    assert outcome(setup, halved(phases, stage)).step_seconds <= outcome(setup, phases).step_seconds * (1 + 1e-9)


def test_an_impossible_setup_is_refused() -> None:
    for setup, phases in ((replace(ONE, samplers=0), TENTHS), (replace(ONE, group_size=9), TENTHS)):
        with pytest.raises(ValueError, match="at least one of each"):
            simulate(setup, phases, 1)
    with pytest.raises(ValueError, match="must take some time"):
        simulate(ONE, replace(TENTHS, decode_seconds=0.0), 1)
