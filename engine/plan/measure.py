"""Phase times from a run that is finished: its metrics.jsonl, its rollouts and its recipe.

The run must have had `max_lag = 0`: only where the stages take turns do `time/*` say what each of them takes.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import recipe_file
from engine.errors import InputError
from engine.plan.gpus import LANDING_TOKEN_SECONDS, RECORD_TOKEN_SECONDS
from engine.plan.outcome import average
from engine.plan.simulate import Phases, Setup, simulate
from engine.recipe import Recipe
from engine.types import CPU_SEQUENCES, GPU_SEQUENCES

KEYS = ("time/sample", "time/grade", "time/train", "time/sync", "tokens/forward", "groups/rounds")
REFITS = 5
"""With several samplers which one was the slowest depends on the fit, which depends on that; it settles soon."""
ALIKE = 0.999
"""The squared cosine between the run's engine steps and its tokens, as vectors over its optimizer steps, above which
nothing tells apart what an engine step costs and what a sequence adds: their ratio varies by less than 3 %. Then all is
the step's, as where decoding reads the weights and little else."""


Work = tuple[int, int]
"""Engine steps and tokens."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run says."""

    recipe: Recipe
    phases: Phases
    cores: int
    """Of its machine."""
    steps: int
    """That it is from."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """A step of the run."""

    sample: float
    grade: float
    train: float
    sync: float
    forward_tokens: float
    groups: tuple[tuple[int, ...], ...]
    """Tokens of the completions, in the order of submission."""

    def work(self, samplers: int, sequences: int) -> list[Work]:
        """Of each sampler that had some: groups are dealt out in turn, and what it has no room for waits."""
        found = []
        for index in range(min(samplers, len(self.groups))):
            lengths = [length for group in self.groups[index::samplers] for length in group]
            places = [0] * min(sequences, len(lengths))
            for length in lengths:
                heapq.heapreplace(places, places[0] + length)
            found.append((max(places), sum(lengths)))
        return found


def _graders(recipe: Recipe, cores: int) -> int:
    """Programs that are judged at once."""
    cluster = recipe.cluster
    if cluster is None:
        return recipe.sandbox.workers or cores
    return cluster.graders * (recipe.sandbox.workers or cluster.grader_cpus)


def measured(run: Path) -> Measured:
    """The phases of the run in a folder; the first step, which warms up, is left out where there are more than two.

    Raises InputError for a folder that is no run, whose files are damaged, or that does not say it.
    """
    recipe, lines = _read(run)
    cores = _cores(run)
    lines = lines[1:] if len(lines) > 2 else lines
    setup = Setup(
        samplers=len(recipe.samplers),
        trainers=recipe.cluster.trainers if recipe.cluster else 1,
        graders=_graders(recipe, cores),
        prompts_per_step=len(lines[0].groups),
        group_size=recipe.rollout.group_size,
    )
    sequences = CPU_SEQUENCES if recipe.rollout.devices[0] == "cpu" else GPU_SEQUENCES
    step, sequence, alike = _decode(lines, setup.samplers, sequences)
    fixed, token = fit_line([line.forward_tokens for line in lines], [line.train for line in lines])
    sampled = sum(sum(map(sum, line.groups)) for line in lines)
    groups = tuple(group for line in lines for group in line.groups)
    mean = sampled / sum(map(len, groups))
    phases = Phases(
        decode_seconds=step,
        decode_sequence_seconds=sequence,
        lengths=groups,
        grade_seconds=0.0,
        train_token_seconds=token * sum(line.forward_tokens for line in lines) / sampled,
        train_step_seconds=fixed,
        sync_seconds=sum(line.sync for line in lines) / len(lines),
        max_sequences=sequences,
        record_seconds=mean * RECORD_TOKEN_SECONDS,
    )
    waited = sum(line.grade for line in lines) / len(lines)
    phases = replace(phases, grade_seconds=fit_grade(setup, phases, len(lines), waited))
    phases = replace(phases, landing_seconds=mean * LANDING_TOKEN_SECONDS)
    notes = ("its lengths don't tell a step's cost from a sequence's: all is the step's",) if alike else ()
    return Measured(recipe, phases, cores, len(lines), notes)


def _decode(lines: Sequence[_Line], samplers: int, sequences: int) -> tuple[float, float, bool]:
    """`fit_decode` on the work of each step's slowest sampler, which the fit itself has to name."""
    seconds = [line.sample for line in lines]
    work = [line.work(samplers, sequences) for line in lines]
    step, sequence, alike = 1.0, 0.0, False
    for _ in range(REFITS):
        slowest = [max(shares, key=lambda w: step * w[0] + sequence * w[1]) for shares in work]
        step, sequence, alike = fit_decode(slowest, seconds)
    return step, sequence, alike


def fit_decode(work: Sequence[Work], seconds: Sequence[float]) -> tuple[float, float, bool]:
    """Seconds of an engine step and those that a sequence adds, by least squares, neither below 0; and whether the data
    can't tell one from the other.

    work: of each run step the engine steps and the tokens that took `seconds`.
    """
    steps, tokens = ([float(pair[i]) for pair in work] for i in (0, 1))
    alone = _slope(steps, seconds)
    a, b, c = _product(steps, steps), _product(steps, tokens), _product(tokens, tokens)
    if b * b > ALIKE * a * c or len(work) < 3:
        return alone, 0.0, True
    d, e = _product(steps, seconds), _product(tokens, seconds)
    step, sequence = (d * c - e * b) / (a * c - b * b), (a * e - b * d) / (a * c - b * b)
    if sequence < 0:
        return alone, 0.0, False
    if step <= 0:  # an engine step takes some time: a hundredth of what it seems to take with its sequences
        return alone / 100, _slope(tokens, seconds), False
    return step, sequence, False


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(a, b) of y = a + b x by least squares, neither below 0."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((v - mean_x) ** 2 for v in x)
    slope = sum((v - mean_x) * (w - mean_y) for v, w in zip(x, y, strict=True)) / spread if spread else 0.0
    if slope <= 0:
        return mean_y, 0.0
    if slope * mean_x > mean_y:
        return 0.0, _slope(x, y)
    return mean_y - slope * mean_x, slope


def fit_grade(setup: Setup, phases: Phases, steps: int, waited: float) -> float:
    """Seconds of a program with which the simulated steps wait for the graders as long as the run's did.

    At `max_lag` 0 the last completion of a step is graded while nothing else is done, so no time is hidden.
    """
    low, high = 0.0, waited
    for _ in range(40):
        middle = (low + high) / 2
        trace = simulate(setup, replace(phases, grade_seconds=middle), steps)
        low, high = (middle, high) if average(setup, trace, 0, steps).grade_seconds < waited else (low, middle)
    return high


def _read(run: Path) -> tuple[Recipe, list[_Line]]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise InputError(f"--from {run}: it has no metrics.jsonl; name the folder of a run that has trained some steps")
    recipe = recipe_file.load(run / "recipe.toml")
    if recipe.rollout.max_lag:
        raise InputError(
            f"--from {run}: with rollout.max_lag = {recipe.rollout.max_lag} the stages' times hide behind each other; "
            f"measure with --set rollout.max_lag=0, some steps are enough"
        )
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        try:
            values: dict[str, Any] = json.loads(text)
            sample, grade, train, sync, forward, rounds = (float(values[key]) for key in KEYS)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"--from {run}: line {number} of metrics.jsonl is not a step's metrics: {error}") from None
        if rounds == 1:  # a refilled step was sampled in several goes
            lines.append(_Line(sample, grade, train, sync, forward, _groups(run, int(values["step"]))))
    if not lines:
        raise InputError(f"--from {run}: no step sampled its groups in one go; run some with rollout.refill = 0")
    return recipe, lines


def _groups(run: Path, step: int) -> tuple[tuple[int, ...], ...]:
    path = run / "rollouts" / f"step-{step:06d}.jsonl.gz"
    groups: dict[int, list[int]] = {}
    try:
        with gzip.open(path, "rt") as file:
            for text in file:
                line = json.loads(text)
                groups.setdefault(line["group"], []).append(max(1, len(line["token_ids"])))
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise InputError(f"--from: {path} can't be read: {error}") from None
    return tuple(tuple(groups[number]) for number in sorted(groups))


def _cores(run: Path) -> int:
    """Of the machine that it ran on."""
    path = run / "manifest.json"
    try:
        return max(1, int(json.loads(path.read_text())["hardware"]["cores"]))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--from: {path} does not say how many cores graded: {error!r}") from None


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """b of y = b x by least squares."""
    return _product(x, y) / _product(x, x)


def _product(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(x, y, strict=True))
