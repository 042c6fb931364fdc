"""The training loop: sample, grade, train, sync; evaluated before and after."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.evaluate import paired_bootstrap
from engine.gates import check_gates
from engine.parts import Parts, timed
from engine.recipe import Recipe
from engine.record import Console, step_metrics, summarise
from engine.snapshot import Snapshot


def run(recipe: Recipe, folder: Path, snapshot: Snapshot, cores: int) -> dict[str, Any]:
    """Train as the recipe says, into `folder`; the summary, which is also summary.json."""
    with ExitStack() as stack:
        parts = Parts(recipe, folder, snapshot, cores, stack)
        console = stack.enter_context(Console(recipe.run.steps))
        before = parts.evaluate(console, "before")
        history: list[dict[str, float]] = []
        for step in range(1, recipe.run.steps + 1):
            seconds: dict[str, float] = {}
            sampled = parts.sample_step(step, seconds)
            with timed(seconds, "train"):
                stats = parts.train(sampled, step)
            with timed(seconds, "sync"):
                canary = parts.sync(version=step, changed=not stats.skipped)
            history.append(step_metrics(sampled, stats, seconds, canary) | parts.counters())
            parts.record.metrics(step, history[-1])
            parts.record.rollouts(f"step-{step:06d}", sampled, parts.tasks)
            console.step(step, history[-1])
            console.short_batch(step, sampled, recipe.rollout.prompts_per_step)
            check_gates(recipe.gate, history)
            if recipe.eval.every and step % recipe.eval.every == 0 and step < recipe.run.steps:
                parts.evaluate(console, f"step {step}")
        parts.pipeline.abort()  # what was sampled ahead and is not trained
        after = parts.evaluate(console, "after")
        exported = parts.export(step)
        gains = {
            name: paired_bootstrap(before[name].by_problem, after[name].by_problem, resamples=recipe.eval.bootstrap)
            for name in before
        }
        summary = summarise(recipe, before, after, gains, history, exported)
        parts.record.summary(summary)
        for name, gain in gains.items():
            console.gain(name, before[name].pass_rate, after[name].pass_rate, gain)
    return summary
