"""The quickstart through TRL's GRPOTrainer and through `rlvr run`: `python bench/against_trl.py --json OUT`.

The same tasks in the same order, seeds, group sizes, token limit, temperature, learning rate, centred rewards, clip,
LoRA and fp32 on both sides, as recipes/quickstart.toml says them; every core for each, one after the other, seeds
interleaved. TRL samples with transformers (its own, all 64 completions at once) and trains in micro-batches of
`--trl-batch`; its reward function is our jail pool with the recipe's reward. Ours is `rlvr run` in a process of its
own, without held-out suites. Both stop at the end of a line: ours by vLLM's stop string, TRL because each token whose
text holds a newline is declared an end token of its model; both train on that token and grade the text before it.

Reward is a step's mean, against the samples seen before it. Samples an hour come from wall seconds of the steps:
TRL's from its step's begin to its end, ours from the phases of each step; and for ours once more over the whole
process, loading vLLM and the trainer included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.peer_trl import Clock, Setting, grpo_trainer, missing  # noqa: E402
from bench.report import Answer, Row, Target, in_a_process, print_rows, publish, resident, rows_of, target  # noqa: E402
from engine.recipe import Recipe  # noqa: E402
from engine.recipe_file import load  # noqa: E402
from engine.reward import Grader  # noqa: E402
from engine.rollout import render_prompts  # noqa: E402
from engine.snapshot import resolve  # noqa: E402
from engine.tasks import Curriculum, load_tasks  # noqa: E402
from engine.types import Completion, Task  # noqa: E402

RECIPE = ROOT / "recipes" / "quickstart.toml"
PHASES = ("sample", "grade", "train", "sync")
UNITS = {"samples_an_hour": "1/h", "with_start_up": "1/h", "step_s": "s", "reward_last": "reward", "whole_mb": "MB"}
FASTER = 8.0


def overrides(seed: int, steps: int) -> tuple[str, ...]:
    """What both sides change of the quickstart."""
    return (f"run.seed={seed}", f"run.steps={steps}", "tasks.heldout={}")


def run_ours(seed: int, steps: int) -> Answer | str:
    """`rlvr run` in a process of its own; rewards and wall seconds of its steps from its metrics."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        settings = [part for text in overrides(seed, steps) for part in ("--set", text)]
        program = "import sys; from engine.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "run", str(RECIPE), *settings, "--output", str(folder)]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        whole = time.perf_counter() - start
        if done.returncode:
            return ((done.stderr + done.stdout).strip().splitlines() or ["no message"])[-1][:160]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(line[f"time/{phase}"] for phase in PHASES) for line in lines]
    return {"rewards": [line["reward/mean"] for line in lines], "seconds": seconds, "whole_s": whole}


def run_trl(seed: int, steps: int, micro_batch: int) -> Answer:
    """TRL's trainer in this process; rewards and wall seconds of its steps."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    recipe = load(RECIPE, overrides(seed, steps))
    model_dir = resolve(recipe.model.source, recipe.model.sha256).folder
    tasks = Curriculum(load_tasks(recipe.tasks.train), seed).take(steps * recipe.rollout.prompts_per_step)
    by_id = {task.id: task for task in tasks}
    starts, seconds = [0.0], list[float]()

    def begin() -> None:
        starts[0] = time.perf_counter()

    def end() -> None:
        seconds.append(time.perf_counter() - starts[0])

    with tempfile.TemporaryDirectory() as scratch, closing(Grader(recipe.sandbox, recipe.reward)) as grader:

        def reward(
            completions: list[str], completion_ids: list[list[int]], task: list[str], **rest: Any
        ) -> list[float | None]:
            futures = [
                grader.submit(by_id[name], completion(name, ids, text, recipe))
                for name, ids, text in zip(task, completion_ids, completions, strict=True)
            ]
            return [future.result().reward for future in futures]

        trainer = grpo_trainer(
            recipe,
            model_dir,
            Setting(micro_batch),
            prompts=[{"prompt": task.prompt, "task": task.id} for task in tasks],
            reward=reward,
            clock=Clock(begin, end),
            output=Path(scratch),
            stop=recipe.rollout.stop[0],
        )
        check_prompts(tasks, trainer.processing_class, recipe)
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    return {"rewards": rewards, "lengths": lengths, "seconds": seconds, "whole_mb": resident("VmHWM")}


def completion(task_id: str, ids: Sequence[int], text: str, recipe: Recipe) -> Completion:
    """A completion of TRL's as our grader takes it: its text ends before the stop string."""
    before = text.split(recipe.rollout.stop[0])[0]
    return Completion(task_id, 0, 0, (), tuple(ids), (), "stop", 0, before)


def check_prompts(tasks: Sequence[Task], tokenizer: Any, recipe: Recipe) -> None:
    """Raise RuntimeError unless TRL's tokens of every prompt are ours."""
    limit = recipe.rollout.max_prompt_tokens
    ours = [prompt.ids for prompt in render_prompts(tasks, tokenizer, recipe.tasks, limit)]
    theirs = tokenizer(text=[str(task.prompt) for task in tasks])["input_ids"]
    if [list(ids) for ids in ours] != theirs:
        raise RuntimeError("the two sides' prompts have different tokens")


def with_rates(answer: Answer, samples: int, last: int) -> Answer:
    """The figures of a run: samples an hour, seconds of a step, mean reward of the last steps."""
    seconds, rewards = answer["seconds"], answer["rewards"]
    count = samples * len(seconds)
    whole = answer.get("whole_s")
    return answer | {
        "samples_an_hour": 3600 * count / sum(seconds),
        "with_start_up": 3600 * count / whole if whole else None,
        "step_s": mean(seconds),
        "reward_last": mean(rewards[-last:]),
    }


def collect(options: argparse.Namespace, notes: list[str]) -> dict[str, list[Answer]]:
    """Every seed through both, interleaved; what each came to is printed at once."""
    recipe = load(RECIPE)
    samples = recipe.rollout.group_size * recipe.rollout.prompts_per_step
    seen: dict[str, list[Answer]] = {"ours": [], "trl": []}
    reason = missing()
    if reason:
        notes.append(f"trl not measured: {reason}")
    for seed in range(options.seeds):
        for impl in ("ours",) if reason else ("ours", "trl"):
            if impl == "ours":
                answer = run_ours(seed, options.steps)
            else:
                arguments = ["--child", str(seed), "--steps", str(options.steps), "--trl-batch", str(options.trl_batch)]
                cores = len(os.sched_getaffinity(0))
                answer = in_a_process(Path(__file__), arguments, threads=cores, limit=options.limit)
            if isinstance(answer, str):
                notes.append(f"seed {seed}: {impl} not measured: {answer}")
                print(notes[-1], flush=True)
                continue
            seen[impl].append(with_rates(answer, samples, options.last))
            print_rows(rows_of(f"seed_{seed}", impl, UNITS, [seen[impl][-1]]))
    return seen


def curve(seen: dict[str, list[Answer]], samples: int) -> list[Row]:
    """Reward over seeds at each number of samples seen."""
    rows = []
    for impl, answers in seen.items():
        for step in range(min((len(answer["rewards"]) for answer in answers), default=0)):
            at = [{"reward": answer["rewards"][step]} for answer in answers]
            rows += rows_of(f"samples_{step * samples:05d}", impl, {"reward": "reward"}, at)
    return rows


def targets(seen: dict[str, list[Answer]]) -> list[Target]:
    """The figures to reach, where both sides were measured: means over seeds, TRL's lowest seed for the reward."""
    ours, theirs = seen["ours"], seen["trl"]
    if not ours or not theirs:
        return []
    rate = mean(a["samples_an_hour"] for a in theirs)
    made = target(
        "reward of the last steps, mean of the seeds, against TRL's lowest seed",
        mean(a["reward_last"] for a in ours),
        min(a["reward_last"] for a in theirs),
        "higher",
    )
    for name, key in (("start-up excluded", "samples_an_hour"), ("start-up included", "with_start_up")):
        value = mean(a[key] for a in ours) / rate
        made += target(f"samples an hour over TRL's, {name}", value, FASTER, "higher")
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run, 64 samples each")
    parser.add_argument("--last", type=int, default=4, help="steps at the end whose mean reward is compared")
    parser.add_argument("--trl-batch", type=int, default=8, help="TRL's micro-batch; 16 takes more than 8 GiB")
    parser.add_argument("--limit", type=float, default=4 * 3600.0, help="seconds one run of TRL may take")
    parser.add_argument("--child", type=int, metavar="SEED", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(run_trl(options.child, options.steps, options.trl_batch)))
        return
    recipe = load(RECIPE)
    resolve(recipe.model.source, recipe.model.sha256)  # fetched once, before anything is measured
    notes = [f"TRL trains in micro-batches of {options.trl_batch}, without activation checkpointing"]
    seen = collect(options, notes)
    rows = curve(seen, recipe.rollout.group_size * recipe.rollout.prompts_per_step)
    for impl, answers in seen.items():
        rows += rows_of("quickstart", impl, UNITS, answers)
    print_rows(rows)
    publish("bench/against_trl.py", rows, targets(seen), notes, options.json)


if __name__ == "__main__":
    main()
