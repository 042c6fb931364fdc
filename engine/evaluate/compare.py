"""Results side by side: gains with their intervals over runs and seeds, and the gate against regressions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.evaluate.bootstrap import paired_bootstrap
from engine.evaluate.results import PROTOCOL, differing, read_answers, read_protocol
from engine.types import Answer, Gain

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Row:
    """One suite of one result against what it is compared with."""

    name: str
    suite: str
    before: float
    after: float
    gain: Gain
    problems: int


def compare(folders: Sequence[Path]) -> list[Row]:
    """Rows of evaluations against the first of them, and of runs against their own beginning.

    Raises InputError for a folder that is neither, and for evaluations that differ in more than the model.
    """
    runs = [folder for folder in folders if not (folder / PROTOCOL).exists()]
    results = [folder for folder in folders if folder not in runs]
    if len(results) == 1:
        raise InputError(f"{results[0]} is one evaluation: name another to compare it with")
    rows = [row for folder in runs for row in _of_run(folder)]
    return rows + [row for folder in results[1:] for row in against(results[0], folder)]


def against(baseline: Path, folder: Path) -> list[Row]:
    """A row for each suite that an evaluation shares with its baseline. Raises InputError as `compare` does."""
    theirs, ours = read_protocol(baseline), read_protocol(folder)
    shared = [suite for suite in ours["suites"] if suite in theirs["suites"]]
    if not shared:
        raise InputError(
            f"{folder} and {baseline} have no suite in common: {', '.join(ours['suites'])} and "
            f"{', '.join(theirs['suites'])}"
        )
    found = differing(theirs["settings"], ours["settings"])
    found += [line for suite in shared for line in differing(theirs["suites"][suite], ours["suites"][suite], suite)]
    if found:
        raise InputError(f"{folder} and {baseline} were not made alike: {'; '.join(found[:4])}")
    before, after = read_answers(baseline), read_answers(folder)
    return [_row(_name(ours), suite, rates(before[suite]), rates(after[suite])) for suite in shared]


def rates(answers: Sequence[Answer]) -> dict[str, float]:
    """The share of right answers to each problem."""
    outcomes: dict[str, list[float]] = {}
    for answer in answers:
        outcomes.setdefault(answer.task_id, []).append(float(answer.verdict == "AC"))
    return {task: sum(each) / len(each) for task, each in outcomes.items()}


def dropped(rows: Sequence[Row], most: float) -> list[Row]:
    """The rows that lost more than `most`, as a share: 0.02 is two points."""
    return [row for row in rows if row.gain.mean < -most]


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as Markdown; where a suite has several, their mean and range below them."""
    lines = [
        "| what | suite | problems | before | after | gain, points | 95 % interval |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        gain = row.gain
        lines.append(
            f"| {row.name} | {row.suite} | {row.problems} | {row.before:.3f} | {row.after:.3f} | "
            f"{100 * gain.mean:+.1f} | [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}] |"
        )
    for suite in dict.fromkeys(row.suite for row in rows):
        several = [row for row in rows if row.suite == suite]
        if len(several) > 1:
            gains = [100 * row.gain.mean for row in several]
            mean = sum(gains) / len(gains)
            lines.append(
                f"| mean of {len(several)} | {suite} | | {_mean([r.before for r in several]):.3f} | "
                f"{_mean([r.after for r in several]):.3f} | {mean:+.1f} | from {min(gains):+.1f} to {max(gains):+.1f} |"
            )
    return lines


def _of_run(folder: Path) -> list[Row]:
    """What a run's own evaluations before and after came to."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        raise InputError(f"{folder}: neither an evaluation nor a run that has ended (it has no summary.json)") from None
    except ValueError as error:
        raise InputError(f"{folder / 'summary.json'}: not valid JSON: {error}") from None
    return [
        Row(
            name=f"{summary['name']} (seed {summary['seed']})",
            suite=name,
            before=suite["before"],
            after=suite["after"],
            gain=Gain(suite["gain"], *suite["ci95"]),
            problems=suite["tasks"],
        )
        for name, suite in summary["suites"].items()
    ]


def _row(name: str, suite: str, before: Mapping[str, float], after: Mapping[str, float]) -> Row:
    try:
        gain = paired_bootstrap(before, after, resamples=RESAMPLES)
    except ValueError as error:
        raise InputError(f"suite {suite}: {error}; let rlvr eval finish both") from None
    return Row(name, suite, _mean(list(before.values())), _mean(list(after.values())), gain, len(before))


def _name(protocol: Mapping[str, Any]) -> str:
    return str(protocol["model"]["name"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
