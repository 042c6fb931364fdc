"""One step's metrics, by the names that people already dashboard. Keys under time/ and perf/ hold wall-clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from engine.types import Graded, Sampled, StepStats


def step_metrics(
    sampled: Sampled,
    stats: StepStats,
    seconds: Mapping[str, float],
    canary: float,
) -> dict[str, float]:
    """Everything that a line of metrics.jsonl holds of a step.

    Rewards, rates and lengths are of all that was sampled, also where only some of its groups are trained.
    """
    graded = [item for group in sampled.groups for item in group]
    judged = [item for item in graded if item.reward is not None]
    rewards = [item.reward for item in judged if item.reward is not None]
    lengths = [len(item.completion.token_ids) for item in graded]
    mixed = sum(any(a != 0.0 for a in row) for row in sampled.advantages)
    lags = [lag for i in sampled.trained for item in sampled.groups[i] for lag in _lags(item, sampled.version)]
    mean_reward = _mean(rewards)
    values = {
        "reward/mean": mean_reward,
        "reward/std": math.sqrt(_mean([(r - mean_reward) ** 2 for r in rewards])),
        "pass_rate": _mean([float(item.verdict.verdict == "AC") for item in judged]),
        "groups/mixed_share": mixed / len(sampled.groups),
        "groups/no_signal": float(len(sampled.groups) - mixed),
        "groups/sampled": float(len(sampled.groups)),
        "groups/trained": float(len(sampled.trained)),
        "groups/rounds": float(sampled.rounds),
        "lag/mean": _mean(lags),
        "lag/max": float(max(lags, default=0)),
        "completions/mean_length": _mean(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/truncated_share": _mean([float(item.completion.truncated) for item in graded]),
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "entropy": stats.entropy,
        "kl": stats.kl,
        "clip/low_share": stats.clip_low_share,
        "clip/high_share": stats.clip_high_share,
        "mismatch/mean_abs_logprob": stats.mismatch_mean,
        "mismatch/max_abs_logprob": stats.mismatch_max,
        "mismatch/gen_kl": stats.gen_kl,
        "mismatch/tokens": float(stats.mismatch_tokens),
        "mismatch/ratio_min": stats.ratio_min,
        "mismatch/ratio_max": stats.ratio_max,
        "sync/canary": canary,
        "sandbox/infra": float(len(graded) - len(judged)),
        "sandbox/soft_share": _mean([float(item.verdict.soft) for item in graded]),
        "tokens/trained": float(stats.trained_tokens),
        "tokens/forward": float(stats.forward_tokens),
        "tokens/sampled": float(sum(lengths)),
        "train/skipped": float(stats.skipped),
        "train/non_finite": float(stats.non_finite),
        "train/micro_batches": float(stats.micro_batches),
        "perf/memory_predicted_mb": stats.memory_predicted_mb,
        "perf/memory_peak_mb": stats.memory_peak_mb,
    }
    for name in sorted({name for item in judged for name in item.parts}):
        values[f"reward/{name}"] = _mean([item.parts[name] for item in judged])
    for name, value in seconds.items():
        values[f"time/{name}"] = value
    waited = seconds.get("sample", 0.0) + seconds.get("grade", 0.0)
    values["perf/trainer_idle_share"] = waited / max(sum(seconds.values()), 1e-9)
    values["perf/tokens_per_second"] = sum(lengths) / max(sum(seconds.values()), 1e-9)
    return values


def _lags(item: Graded, version: int) -> list[int]:
    """How many versions old each token is when `version` is trained on it."""
    return [version - own for own in item.completion.versions]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
