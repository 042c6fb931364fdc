"""The training loop: sample, grade, train, sync; evaluated before and after; saved on the way."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.evaluate import paired_bootstrap
from engine.gates import check_gates, check_mismatch
from engine.parts import Parts, timed
from engine.recipe import Recipe
from engine.record import Console, step_metrics, summarise
from engine.record.checkpoint import Saved
from engine.snapshot import Snapshot
from engine.stop import Stop, Stopped
from engine.train.ranks import ALONE, Ranks


def run(
    recipe: Recipe,
    folder: Path,
    snapshot: Snapshot,
    cores: int,
    saved: Saved | None = None,
    ranks: Ranks = ALONE,
    *,
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Train as the recipe says, into `folder`, on from a checkpoint if there is one, alone or leading other ranks.

    Gives the summary, which is also summary.json; None where it was asked to stop and has saved what it had.
    """
    with ExitStack() as stack:
        console = stack.enter_context(Console(recipe.run.steps, folder / "log.txt", quiet=quiet))
        parts = Parts(recipe, folder, snapshot, cores, stack, console.say, saved, ranks)
        stop = stack.enter_context(Stop())
        history = parts.record.history
        try:
            for step in range(len(history) + 1, recipe.run.steps + 1):
                with stop.at_once():
                    parts.evaluate_if_due(console, step - 1)
                seconds: dict[str, float] = {}
                sampled = parts.sample_step(step, seconds)
                with timed(seconds, "train"):
                    stats = parts.train(sampled, step)
                with timed(seconds, "sync"):
                    canary = parts.sync(version=step, changed=not stats.skipped)
                history.append(step_metrics(sampled, stats, seconds, canary) | parts.counters())
                parts.record.metrics(step, history[-1])
                parts.record.rollouts(f"step-{step:06d}", sampled, parts.tasks, stats.gaps)
                console.step(history, sampled, recipe.rollout.prompts_per_step)
                check_mismatch(recipe.sync.max_mismatch, step, history[-1])
                check_gates(recipe.gate, history)
                stop.check()
                if recipe.checkpoint.every and step % recipe.checkpoint.every == 0:
                    parts.save(step)
            parts.save(len(history))
            with stop.at_once():
                parts.pipeline.abort()  # what was sampled ahead and is not trained
                after = parts.evaluate(console, "after")
        except Stopped:
            where = parts.save(len(history)) if history else "nothing was trained yet"
            console.say(f"stopped after step {len(history)}: {where}")
            return None
        exported = parts.export(len(history))
        gains = {
            name: paired_bootstrap(result.by_problem, after[name].by_problem, resamples=recipe.eval.bootstrap)
            for name, result in parts.before.items()
        }
        summary = summarise(recipe, parts.before, after, gains, history, exported)
        parts.record.summary(summary)
        for name, gain in gains.items():
            console.gain(name, parts.before[name].pass_rate, after[name].pass_rate, gain)
    return summary
