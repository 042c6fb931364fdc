"""How much of the time samplers and trainer wait for each other: `python bench/overlap.py --json OUT`.

`delays`: the run's own pipeline, grader pool included, between a source that takes one second for a step's groups and a
trainer that takes one second for them; ten steps at `max_lag` 0 and 1. Nothing else is replaced, so what is left over
is the pipeline's own. `real`: the quickstart with a core for the sampler and one for the trainer, at lag 0 and 1, the
idle shares as its metrics have them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Row, print_rows, publish, target  # noqa: E402
from engine import recipe_file  # noqa: E402
from engine.pipeline import Ahead, Finished, Pipeline  # noqa: E402
from engine.reward import Grader  # noqa: E402
from engine.rollout.messages import Group, Sampling  # noqa: E402
from engine.tasks import load_tasks  # noqa: E402
from engine.types import Completion  # noqa: E402

SECONDS, STEPS, PER_STEP, MEMBERS = 1.0, 10, 4, 4
LIMIT_SECONDS, LIMIT_IDLE = 13.0, 0.05


class Delayed:
    """A source that spends SECONDS on PER_STEP groups, one completion after the other, like a sampler that is busy."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.version = 0
        self.busy = 0.0
        self._answers = answers
        self._todo: queue.SimpleQueue[Group] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, groups: Sequence[Group]) -> None:
        """Queue groups."""
        for group in groups:
            self._todo.put(group)

    def abort(self, groups: Sequence[int]) -> None:
        """Nothing: what is queued is few."""

    def poll(self) -> Completion | None:
        """The next completion."""
        try:
            return self._out.get(timeout=0.5)
        except queue.Empty:
            return None

    def _work(self) -> None:
        while True:
            group = self._todo.get()
            for member in range(len(group.seeds)):
                start = time.monotonic()
                time.sleep(SECONDS / PER_STEP / MEMBERS)
                self.busy += time.monotonic() - start
                text = self._answers[member % len(self._answers)]
                self._out.put(
                    Completion(group.task_id, group.group, member, (1,), (2,), (-1.0,), "stop", self.version, text)
                )


def delayed_run(lag: int) -> dict[str, float]:
    """Ten steps; seconds in all and, after the first step, the shares of time in which each side did nothing."""
    recipe = recipe_file.load(ROOT / "recipes" / "quickstart.toml")
    tasks = load_tasks(recipe.tasks.train)[: PER_STEP * STEPS]
    by_id = {task.id: task for task in tasks}
    source = Delayed(("1)", "a)", "b)", "a+b)"))
    with closing(Grader(recipe.sandbox, recipe.reward)) as grader:
        pipeline = Pipeline(source, lambda c: grader.submit(by_id[c.task_id], c))
        number = 0

        def submit(count: int) -> list[Future[Finished]]:
            nonlocal number
            chosen = [tasks[(number + i) % len(tasks)] for i in range(count)]
            groups = [
                Group(number + i, task.id, (1,), tuple(range(MEMBERS)), Sampling(4)) for i, task in enumerate(chosen)
            ]
            number += count
            return pipeline.submit(groups)

        with closing(pipeline):
            ahead = Ahead(submit, per_step=PER_STEP, steps=STEPS, max_lag=lag)
            start = time.monotonic()
            waited, first_end, first_busy = 0.0, start, 0.0
            for version in range(STEPS):
                asked = time.monotonic()
                ahead.take(PER_STEP, version)
                waited += time.monotonic() - asked if version else 0.0
                time.sleep(SECONDS)  # the trainer's work
                source.version = version + 1
                if version == 0:
                    first_end, first_busy = time.monotonic(), source.busy
            end = time.monotonic()
    # With nothing left to sample the source rests during the last step's training, which is no waiting for the trainer.
    span = end - SECONDS - first_end if lag else end - first_end
    return {
        "seconds": end - start,
        "trainer_idle": waited / (end - first_end),
        "sampler_idle": max(0.0, 1 - (source.busy - first_busy) / span),
    }


def real_run(lag: int, steps: int) -> dict[str, float]:
    """The quickstart with one thread for the sampler and one for the trainer; medians after the first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).parent / "rlvr"), "run", str(ROOT / "recipes" / "quickstart.toml"),
            "--output", f"{folder}/run", "--max-steps", str(steps), "--set", "tasks.heldout={}",
            "--set", f"rollout.max_lag={lag}", "--set", "rollout.threads=1", "--set", "train.threads=1",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_WAIT_POLICY": "passive"})
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()][1:]
    names = {
        "trainer_idle": "perf/trainer_idle_share",
        "sampler_idle": "perf/sampler_idle_share",
        "lag": "lag/mean",
        "mismatch": "mismatch/mean_abs_logprob",
    }
    found = {name: median(line[key] for line in lines) for name, key in names.items()}
    phases = ("sample", "grade", "train", "sync")
    return found | {"step_seconds": median(sum(line[f"time/{phase}"] for phase in phases) for line in lines)}


UNITS = {
    "seconds": "s", "trainer_idle": "fraction", "sampler_idle": "fraction", "lag": "versions", "mismatch": "nats",
    "step_seconds": "s",
}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--steps", type=int, default=6, help="of each real run; 0 leaves them out")
    arguments = parser.parse_args()
    rows: list[Row] = []
    found: dict[str, dict[str, float]] = {}
    for lag in (0, 1):
        found[f"delays, lag {lag}"] = delayed_run(lag)
        if arguments.steps:
            found[f"quickstart, lag {lag}"] = real_run(lag, arguments.steps)
    for case, figures in found.items():
        rows += [Row(case, "ours", name, UNITS[name], value, value, value) for name, value in figures.items()]
    one = found["delays, lag 1"]
    targets = [
        *target("seconds of ten steps at lag 1", one["seconds"], LIMIT_SECONDS, "lower"),
        *target("trainer idle after the first step", one["trainer_idle"], LIMIT_IDLE, "lower"),
        *target("sampler idle after the first step", one["sampler_idle"], LIMIT_IDLE, "lower"),
    ]
    print_rows(rows)
    publish("bench/overlap.py", rows, targets, (), arguments.json)


if __name__ == "__main__":
    main()
