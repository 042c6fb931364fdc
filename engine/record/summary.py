"""summary.json: a run in one small object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.recipe import Recipe
from engine.types import Gain, SuiteResult

PHASES = ("sample", "grade", "train", "sync")


def summarise(
    recipe: Recipe,
    before: Mapping[str, SuiteResult],
    after: Mapping[str, SuiteResult],
    gains: Mapping[str, Gain],
    history: Sequence[Mapping[str, float]],
    exported: Path,
) -> dict[str, Any]:
    """The headline suite as `heldout`, every suite under `suites`, seconds by phase over all steps."""
    suites = {
        name: {
            "before": before[name].pass_rate,
            "after": after[name].pass_rate,
            "gain": gains[name].mean,
            "ci95": [gains[name].low, gains[name].high],
            "tasks": len(after[name].by_problem),
            "samples": recipe.eval.samples,
            "by_source": {"before": dict(before[name].by_source), "after": dict(after[name].by_source)},
        }
        for name in before
    }
    seconds = {phase: sum(step[f"time/{phase}"] for step in history) for phase in PHASES}
    return {
        "name": recipe.run.name,
        "seed": recipe.run.seed,
        "steps": len(history),
        "heldout": next(iter(suites.values()), None),
        "suites": suites,
        "seconds": seconds,
        "tokens_per_second": sum(step["tokens/sampled"] for step in history) / max(sum(seconds.values()), 1e-9),
        "mismatch": {"mean_abs_logprob": _mean([step["mismatch/mean_abs_logprob"] for step in history])},
        "adapter" if recipe.lora is not None else "model": str(exported),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
