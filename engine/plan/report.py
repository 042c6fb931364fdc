"""The plan of a recipe, for a person and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.plan import gpus as sheets
from engine.plan.measure import Measured, measured
from engine.plan.model import ModelSize, model_size
from engine.plan.outcome import Verdict, judge
from engine.plan.scale import Row, enough, table
from engine.plan.simulate import Phases, Setup
from engine.recipe import Recipe

COLUMNS = 100
Lengths = tuple[tuple[int, ...], ...]
"""As in `Phases`."""
DEFAULT_GPU = "h100"


@dataclass(frozen=True, slots=True)
class Basis:
    """Where a plan's times are from."""

    said: tuple[str, ...]
    """For a person, a line each."""
    phases_of: Callable[[Setup], Phases]
    graders_for: Callable[[int], int]
    """Programs judged at once, by the number of devices."""


def plan_lines(
    recipe: Recipe,
    memory: Iterable[str] = (),
    *,
    samplers: int | None = None,
    trainers: int | None = None,
    gpu: str | None = None,
    run: Path | None = None,
    mean_tokens: float | None = None,
    out: Path | None = None,
) -> Iterator[str]:
    """The plan of a recipe and a table over more and more devices, in lines of at most COLUMNS; as JSON to `out`.

    memory: lines about each device, which stand first; they are asked for once all else is known to be right.
    samplers, trainers: in the place of the recipe's. gpu: whose data sheet, h100 if None and there is no run. run: a
    finished run, whose lengths and grading are taken, and where `gpu` is None its times too. mean_tokens: of a
    completion, where no run says it. Raises InputError for what can't be planned.
    """
    if run is not None and mean_tokens is not None:
        raise InputError(f"--mean-tokens {mean_tokens:g} beside --from {run}: a run says its lengths; drop one")
    measurement = measured(run) if run is not None else None
    sheet = sheets.gpu_named(gpu or DEFAULT_GPU) if gpu or run is None else None
    lengths = _lengths(recipe, measurement, mean_tokens)
    for line in memory:  # what fetches the model's config.json, if it can be had
        yield from _wrapped(line)
    basis = _basis(recipe, model_size(recipe), sheet, measurement, lengths)
    setup, devices = _setup(recipe, samplers, trainers, basis)
    verdict = judge(setup, basis.phases_of)
    rows = table(setup, basis.phases_of, tensor_parallel=recipe.rollout.tensor_parallel, graders_for=basis.graders_for)
    for line in (*basis.said, *_notes(recipe, setup), *_phases(basis.phases_of(setup), setup)):
        yield from _wrapped(line)
    yield ""
    for line in _verdict(verdict, devices):
        yield from _wrapped(line)
    yield ""
    yield from _table(rows)
    yield ""
    for line in _limits(rows, setup, basis.phases_of):
        yield from _wrapped(line)
    if out is not None:
        out.write_text(json.dumps(_json(recipe, basis, verdict, rows), indent=1) + "\n")


def _lengths(recipe: Recipe, run: Measured | None, mean_tokens: float | None) -> Lengths:
    rollout = recipe.rollout
    if run is not None:
        return _regrouped(run.phases.lengths, rollout.group_size)
    mean = mean_tokens if mean_tokens is not None else sheets.MEAN_SHARE * rollout.max_tokens
    return sheets.drawn_lengths(mean, rollout.max_tokens, rollout.group_size)


def _basis(recipe: Recipe, model: ModelSize, sheet: sheets.Gpu | None, run: Measured | None, lengths: Lengths) -> Basis:
    said = [f"model {model.parameters / 1e9:.3g} billion parameters, by {model.source}", *_tokens(recipe, run, lengths)]
    cores = run.cores / (len(run.recipe.rollout.devices) + 1) if run is not None else sheets.CORES_A_GPU
    phases_of: Callable[[Setup], Phases]
    if sheet is not None:
        grade = run.phases.grade_seconds if run is not None else sheets.GRADE_SECONDS
        phases_of = partial(sheets.sheet_phases, recipe, model, sheet, lengths, grade)
        said += _sheet(recipe, sheet)
    else:
        assert run is not None  # times are from one of the two
        phases_of = partial(_run_phases, replace(run.phases, lengths=lengths), model, recipe.optim.updates)
        said += [f"times of the run, from {run.steps} steps, for devices like its own"]
        said += [f"note {note}" for note in run.notes]
    named = recipe.sandbox.workers
    return Basis(tuple(said), phases_of, lambda gpus: named or max(1, round(gpus * cores)))


def _run_phases(phases: Phases, model: ModelSize, updates: int, setup: Setup) -> Phases:
    """A run's, and the exchange of gradients, which a run with one trainer does not have."""
    exchanged = sheets.network_seconds(model.trained * 4, setup.trainers)
    return replace(phases, exchange_seconds=exchanged * updates)


def _tokens(recipe: Recipe, run: Measured | None, lengths: Lengths) -> Iterator[str]:
    mean = sum(map(sum, lengths)) / sum(map(len, lengths))
    longest = recipe.rollout.max_tokens
    if run is None:
        yield (
            f"tokens assumed: completions of {mean:,.0f} on average, lognormal, cut off at {longest:,}; "
            f"{sheets.GRADE_SECONDS:g} s to grade one; --from RUN takes both from a run"
        )
        return
    yield f"tokens of the run: completions of {mean:,.0f} on average; {run.phases.grade_seconds:.3g} s to grade one"
    if longest != run.recipe.rollout.max_tokens:
        yield (
            f"note the run's rollout.max_tokens is {run.recipe.rollout.max_tokens}, the recipe's {longest}: its "
            f"lengths are taken as they are"
        )


def _sheet(recipe: Recipe, sheet: sheets.Gpu) -> Iterator[str]:
    if recipe.rollout.devices[0] == "cpu":
        yield f"note rollout.devices are cpu, of which no data sheet is here: this is the recipe on {sheet.name}"
    dtype = recipe.model.dtype
    yield (
        f"times of {sheet.name} by its data sheet, nothing measured: {sheets.TRAIN_MFU:.0%} of "
        f"{sheets.peak(sheet, dtype) / 1e12:g} dense {dtype} TFLOP/s in training, "
        f"{sheets.PREFILL_MFU:.0%} for prompts; {sheets.DECODE_BANDWIDTH_USE:.0%} of "
        f"{sheet.hbm_gb_per_second:g} GB/s and {1000 * sheets.STEP_SECONDS:g} ms a step in decoding; "
        f"engine/plan/gpus.py says why"
    )


def _setup(recipe: Recipe, samplers: int | None, trainers: int | None, basis: Basis) -> tuple[Setup, int]:
    """The recipe's, and how many devices it has."""
    rollout = recipe.rollout
    samplers_now = samplers or len(recipe.samplers)
    trainers_now = trainers or (recipe.cluster.trainers if recipe.cluster else 1)
    shared = samplers is None and trainers is None and _shared(recipe)
    devices = samplers_now * rollout.tensor_parallel + (0 if shared else trainers_now)
    setup = Setup(
        samplers=samplers_now,
        trainers=trainers_now,
        graders=basis.graders_for(devices),
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_lag=rollout.max_lag,
        oversample=rollout.oversample,
    )
    return setup, devices


def _shared(recipe: Recipe) -> bool:
    """Whether a GPU both samples and trains."""
    return recipe.cluster is None and recipe.train.device != "cpu" and recipe.train.device in recipe.rollout.devices


def _notes(recipe: Recipe, setup: Setup) -> Iterator[str]:
    if _shared(recipe):
        yield f"note sampler and trainer share {recipe.train.device}, by turns; the table gives each its own"
        if setup.max_lag:
            yield "note with rollout.max_lag above 0 they would slow each other down there, which is not planned"
    if recipe.rollout.refill:
        yield "note rollout.refill is not planned: groups without a signal count as trained"
    if setup.samplers > setup.prompts_per_step * (1 + setup.max_lag) + setup.oversample:
        yield (
            f"note {setup.samplers} samplers, and at most {setup.prompts_per_step * (1 + setup.max_lag)} groups under "
            f"way, each whole on one sampler: some never have work"
        )


def _phases(phases: Phases, setup: Setup) -> Iterator[str]:
    fixed = phases.train_step_seconds + phases.exchange_seconds
    yield (
        f"phase sampling {1000 * phases.decode_seconds:.3g} ms an engine step + "
        f"{1000 * phases.decode_sequence_seconds:.3g} ms a sequence, at most {phases.max_sequences} of them, when full "
        f"{_full(phases):,.0f} tokens/s a sampler; training {1000 * phases.train_token_seconds:.3g} ms a token + "
        f"{_round(fixed)} s a step; sync {_round(phases.sync_seconds)} s; {setup.graders} graders; driver "
        f"{1000 * (phases.landing_seconds + phases.record_seconds):.2g} ms a completion"
    )


def _verdict(verdict: Verdict, devices: int) -> Iterator[str]:
    setup, now = verdict.setup, verdict.outcome
    yield (
        f"plan samplers:trainers {setup.samplers}:{setup.trainers}, lag {setup.max_lag}, {setup.prompts_per_step} "
        f"prompts x {setup.group_size}: {_round(now.step_seconds)} s a step, {now.tokens_per_second:,.0f} tokens/s, "
        f"{now.tokens_per_second / devices:,.0f} a device"
    )
    yield (
        f"plan a step waits {_round(now.sample_seconds)} s for samples and {_round(now.grade_seconds)} s for grades, "
        f"trains {_round(now.train_seconds)} s, syncs {_round(now.sync_seconds)} s"
    )
    yield (
        f"plan samplers idle {now.sampler_idle_share:.0%}, trainer idle {now.trainer_idle_share:.0%}, graders busy "
        f"{now.grader_busy_share:.0%}; groups waiting for graders {now.grader_queue_mean:.1f} (at most "
        f"{now.grader_queue_max}), for the trainer {now.trainer_queue_mean:.1f} (at most {now.trainer_queue_max})"
    )
    yield f"plan bottleneck {verdict.bottleneck}: {verdict.advice}"


def _full(phases: Phases) -> float:
    """Tokens a second of a sampler with all the sequences that it can take."""
    count = phases.max_sequences
    return count / (phases.decode_seconds + phases.decode_sequence_seconds * count)


def _round(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "  GPUs  samplers:trainers  unused  step s  tokens/s  a GPU  sampler  trainer  graders  bottleneck"
    yield "                                                             idle     idle     busy"
    for row in rows:
        if row.verdict is None:
            yield f"{row.gpus:6,}  too few for a sampler and a trainer"
            continue
        setup, now = row.verdict.setup, row.verdict.outcome
        yield (
            f"{row.gpus:6,}  {f'{setup.samplers}:{setup.trainers}':>17}  {row.unused:6,}  "
            f"{_round(now.step_seconds):>6}  {now.tokens_per_second:8,.0f}  {now.tokens_per_second / row.gpus:5,.0f}  "
            f"{now.sampler_idle_share:7.0%}  {now.trainer_idle_share:7.0%}  {now.grader_busy_share:7.0%}  "
            f"{row.verdict.bottleneck}"
        )


def _limits(rows: Sequence[Row], setup: Setup, phases_of: Callable[[Setup], Phases]) -> Iterator[str]:
    """Where more devices stop helping, and what the driver could do."""
    work = f"{setup.prompts_per_step} prompts x {setup.group_size} at lag {setup.max_lag}"
    best = next(row.verdict for row in reversed(rows) if row.verdict is not None)
    phases = phases_of(best.setup)
    longest = max(map(max, phases.lengths))
    alone = longest * (phases.decode_seconds + phases.decode_sequence_seconds)
    if (stop := enough(rows)) is not None:
        yield (
            f"note the batch is fixed, {work}: more than {stop:,} GPUs give less than 5 % more. The longest "
            f"completion, {longest:,} tokens, alone on a sampler takes {_round(alone)} s; {best.advice}"
        )
    else:
        yield f"note the batch is fixed, {work}: the largest size above still gives 5 % more than the one before"
    driver = phases.landing_seconds + phases.record_seconds
    mean = sum(map(sum, phases.lengths)) / sum(map(len, phases.lengths))
    completions = (setup.prompts_per_step + setup.oversample) * setup.group_size
    share, most = completions * driver / best.outcome.step_seconds, mean / driver
    samplers = most / _full(phases)
    yield (
        f"note the driver's {1000 * driver:.2g} ms a completion are {share:.1%} of a step in the last row; with a "
        f"batch that grows it would be the limit at {most:,.0f} tokens/s, {samplers:,.0f} times a full sampler"
    )


def _regrouped(lengths: Lengths, size: int) -> Lengths:
    """Groups of `size`: the run's own where they have as many members, else cut anew from their completions."""
    if all(len(group) == size for group in lengths):
        return lengths
    flat = [length for group in lengths for length in group]
    flat *= -(-size // len(flat))
    return tuple(tuple(flat[i : i + size]) for i in range(0, len(flat) - size + 1, size))


def _json(recipe: Recipe, basis: Basis, verdict: Verdict, rows: Sequence[Row]) -> dict[str, Any]:
    phases = asdict(basis.phases_of(verdict.setup))
    lengths = [length for group in phases.pop("lengths") for length in group]
    return {
        "recipe": recipe.run.name,
        "basis": list(basis.said),
        "phases": phases | {"mean_tokens": sum(lengths) / len(lengths), "max_tokens": max(lengths)},
        "plan": asdict(verdict),
        "table": [asdict(row) for row in rows],
    }


def _wrapped(line: str) -> list[str]:
    """A line that begins with a word of its own, in at most COLUMNS."""
    return textwrap.wrap(line, COLUMNS, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
