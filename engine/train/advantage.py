"""The first choice of the loss: from a group's rewards to its advantages.

Each entry of `ADVANTAGES` is a pure function `[n] -> [n]` in float64. Rewards that are NaN (masked, INFRA) leave the
group's statistics and get advantage 0. A group whose valid rewards do not differ, or that has fewer than two of them,
is all zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

STD_EPS = 1e-4
"""Added to the standard deviation, as TRL does (trl/trainer/grpo_trainer.py)."""
SPREAD_TOLERANCE = 1e-9
"""Rewards closer than this, relative to the largest, are equal; rounding must not be made into a signal."""


def group(rewards: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + 1e-4), the sample std (ddof 1) in two passes (GRPO, DeepSeekMath, arXiv 2402.03300)."""
    centred_rewards = centred(rewards)
    valid = ~rewards.isnan()
    if int(valid.sum()) < 2:
        return centred_rewards
    std = (centred_rewards[valid].square().sum() / (int(valid.sum()) - 1)).sqrt()
    return centred_rewards / (std + STD_EPS)


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """r - mean, without a scale (Dr.GRPO, arXiv 2503.20783)."""
    return torch.where(_has_signal(rewards) & ~rewards.isnan(), rewards - rewards.nanmean(), 0.0)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """r - mean of the others (RLOO, arXiv 2402.14740); equals centred times n / (n - 1)."""
    n = int((~rewards.isnan()).sum())
    return centred(rewards) * (n / max(n - 1, 1))


def max_rl(rewards: torch.Tensor) -> torch.Tensor:
    """(r - mean) / mean, zero where the mean is not positive (MaxRL; prime-rl's algo/max_rl.py)."""
    mean = rewards.nanmean()
    return centred(rewards) / mean if float(mean) > 0 else torch.zeros_like(rewards)


ADVANTAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group": group,
    "centred": centred,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
}


def _has_signal(rewards: torch.Tensor) -> torch.Tensor:
    valid = rewards[~rewards.isnan()]
    if valid.numel() < 2:
        return torch.tensor(False)
    return valid.max() - valid.min() > SPREAD_TOLERANCE * valid.abs().max().clamp(min=1.0)
