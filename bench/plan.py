"""How well `rlvr plan` predicts real runs: `python bench/plan.py --json OUT`, on an idle machine.

The tiny model of the tests runs through `rlvr run` with real vLLM and real jails, with one sampler and two, at lag 0
and 1, with fast graders and slow ones. Two cores can't stand for four devices, so most of each stage's time is a delay
(`bench/slowed.py`); what is left of contention is in the figures. Phase times are taken from the first run alone (fast
graders, one sampler, lag 0) as `--from RUN` takes them; of the slow graders the plan is told how much longer they
sleep. Then each run is simulated with as many steps as it had, and the same steps of both are compared: all but the
first, while the pipeline fills, and at lag 1 the last.

The targets: seconds of a step within 15 % of the run's, idle shares within 0.15.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Row, print_rows, publish, target  # noqa: E402
from bench.slowed import GRADERS  # noqa: E402
from engine.plan.measure import measured  # noqa: E402
from engine.plan.outcome import average  # noqa: E402
from engine.plan.simulate import Phases, Setup, simulate  # noqa: E402
from tests.small import make_model, write_recipe  # noqa: E402

FAST_SECONDS, SLOW_SECONDS = 0.04, 0.25
PROMPTS, MEMBERS = 4, 4
LIMIT = 0.15
LIMIT_SECONDS = 180.0
CASES = [(samplers, lag, slow) for slow in (False, True) for lag in (0, 1) for samplers in (1, 2)]
UNITS = {"step_seconds": "s", "trainer_idle": "fraction", "sampler_idle": "fraction"}


def real(model: Path, folder: Path, samplers: int, lag: int, slow: bool, steps: int) -> Path:
    """A run with delays; its folder."""
    folder.mkdir()
    recipe = write_recipe(
        folder / "recipe.toml", model, run_steps=steps, tasks_heldout={}, eval_every=0, checkpoint_every=0,
        rollout_group_size=MEMBERS, rollout_prompts_per_step=PROMPTS, rollout_max_tokens=12, rollout_threads=1,
        rollout_max_lag=lag, rollout_devices=["cpu"] * samplers, sandbox_workers=GRADERS, train_threads=1,
        optim_lr=1e-7,
    )  # fmt: skip
    seconds = SLOW_SECONDS if slow else FAST_SECONDS
    command = [sys.executable, str(ROOT / "bench" / "slowed.py"), str(seconds), str(recipe), "--output", "run"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the run with {samplers} samplers at lag {lag} failed: {done.stderr.strip()[-500:]}")
    return folder / "run"


def of_run(run: Path, lag: int) -> dict[str, list[float]]:
    """Each compared step's figures."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = lines[1 + lag : len(lines) - lag]
    phases = ("time/sample", "time/grade", "time/train", "time/sync")
    return {
        "step_seconds": [sum(line[phase] for phase in phases) for line in lines],
        "trainer_idle": [line["perf/trainer_idle_share"] for line in lines],
        "sampler_idle": [line["perf/sampler_idle_share"] for line in lines],
    }


def of_plan(phases: Phases, samplers: int, lag: int, slow: bool, steps: int) -> dict[str, float]:
    """The same of a simulated run."""
    setup = Setup(samplers, 1, GRADERS, PROMPTS, MEMBERS, lag)
    if slow:
        phases = replace(phases, grade_seconds=phases.grade_seconds + SLOW_SECONDS - FAST_SECONDS)
    found = average(setup, simulate(setup, phases, steps), 1 + lag, steps - lag)
    return {
        "step_seconds": found.sample_seconds + found.grade_seconds + found.train_seconds + found.sync_seconds,
        "trainer_idle": found.trainer_idle_share,
        "sampler_idle": found.sampler_idle_share,
    }


def said(case: str, phases: Phases) -> str:
    """The phases, for a person."""
    return (
        f"phases of '{case}': engine step {1000 * phases.decode_seconds:.1f} ms + "
        f"{1000 * phases.decode_sequence_seconds:.2f} ms a sequence, a program {phases.grade_seconds:.3f} s, training "
        f"{phases.train_step_seconds:.2f} s + {1000 * phases.train_token_seconds:.2f} ms a token, sync "
        f"{phases.sync_seconds:.3f} s"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    arguments = parser.parse_args()
    rows: list[Row] = []
    step_errors, idle_errors = [], []
    notes = []
    phases: Phases | None = None
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model")
        for number, (samplers, lag, slow) in enumerate(CASES):
            case = f"{samplers} samplers, lag {lag}, {'slow' if slow else 'fast'}"
            run = real(model, Path(scratch) / str(number), samplers, lag, slow, arguments.steps)
            if phases is None:
                found = measured(run)
                phases = found.phases
                notes += [said(case, phases), *found.notes]
            ours, theirs = of_run(run, lag), of_plan(phases, samplers, lag, slow, arguments.steps)
            new = []
            for metric, unit in UNITS.items():
                values = ours[metric]
                new.append(Row(case, "run", metric, unit, min(values), mean(values), max(values)))
                new.append(Row(case, "plan", metric, unit, *[theirs[metric]] * 3))
            print_rows(new)
            rows += new
            if number:  # the first is what the plan was made from
                step_errors.append(abs(theirs["step_seconds"] / mean(ours["step_seconds"]) - 1))
                idle_errors += [abs(theirs[name] - mean(ours[name])) for name in ("trainer_idle", "sampler_idle")]
    targets = [
        *target("step seconds, largest relative error of 7 predictions", max(step_errors), LIMIT, "lower"),
        *target("idle shares, largest error of 14 predictions", max(idle_errors), LIMIT, "lower"),
    ]
    notes += [
        f"mean errors: step seconds {mean(step_errors):.1%}, idle shares {mean(idle_errors):.3f}",
        "the column in the middle is the mean of a run's steps, not their median: idle shares of one step are noisy",
    ]
    publish("bench/plan.py", rows, targets, notes, arguments.json)


if __name__ == "__main__":
    main()
