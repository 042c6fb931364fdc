"""From what a step's micro-batches came to, to its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.train.objective import k3
from engine.types import StepStats

GAPS, LEAST_GAP = 16, 0.01
"""Tokens of a completion that are kept as gaps at most, and the least difference in nats that is one."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a micro-batch came to; every tensor is `[N]`, a trained token each, on the CPU."""

    loss: float
    forward_tokens: int
    logprobs: torch.Tensor
    entropies: torch.Tensor
    started: torch.Tensor
    """Log-probs at the step's start."""
    sampled: torch.Tensor
    clipped: torch.Tensor
    """-1 where the lower clip binds, 1 where the upper one does."""
    sequences: torch.Tensor
    versions: torch.Tensor
    reference: torch.Tensor | None
    """Log-probs under the base, where the loss has a KL term."""


def step_stats(
    updates: Sequence[tuple[Sequence[Part], float]],
    version: int,
    lr: float,
    *,
    predicted_mb: float,
    peak_mb: float,
) -> StepStats:
    """updates: the micro-batches of each optimizer step and its gradient's norm; version: the one that was trained."""
    parts = [part for update, _ in updates for part in update]
    norms = [norm for _, norm in updates]
    new = torch.cat([part.logprobs for part in parts])
    clipped = torch.cat([part.clipped for part in parts])
    gap = torch.cat([part.started - part.sampled for part in parts])
    own = gap[torch.cat([part.versions for part in parts]) == version]  # an older version's tokens differ anyway
    references = [part.reference for part in parts if part.reference is not None]
    return StepStats(
        loss=sum(part.loss for part in parts) / len(updates),
        grad_norm=sum(norms) / len(norms),
        lr=lr,
        entropy=float(torch.cat([part.entropies for part in parts]).mean()),
        kl=float(k3(new, torch.cat(references)).mean()) if references else 0.0,
        clip_low_share=float((clipped < 0).float().mean()),
        clip_high_share=float((clipped > 0).float().mean()),
        mismatch_mean=float(own.abs().mean()) if len(own) else 0.0,
        mismatch_max=float(own.abs().max()) if len(own) else 0.0,
        gen_kl=float((torch.expm1(own) - own).mean()) if len(own) else 0.0,
        mismatch_tokens=len(own),
        ratio_min=float(gap.min().exp()),
        ratio_max=float(gap.max().exp()),
        trained_tokens=new.numel(),
        forward_tokens=sum(part.forward_tokens for part in parts),
        micro_batches=len(parts),
        skipped=not any(math.isfinite(norm) for norm in norms),
        non_finite=sum(not math.isfinite(norm) for norm in norms),
        memory_predicted_mb=predicted_mb,
        memory_peak_mb=peak_mb,
        gaps=_largest_gaps(gap, torch.cat([part.sequences for part in parts])),
    )


def nothing_trained(lr: float) -> StepStats:
    """Of a step without a signal."""
    return StepStats(
        loss=0.0, grad_norm=0.0, lr=lr, entropy=0.0, kl=0.0, clip_low_share=0.0, clip_high_share=0.0, mismatch_mean=0.0,
        mismatch_max=0.0, gen_kl=0.0, mismatch_tokens=0, ratio_min=1.0, ratio_max=1.0, trained_tokens=0,
        forward_tokens=0, micro_batches=0, skipped=True, non_finite=0, memory_predicted_mb=0.0, memory_peak_mb=0.0,
    )  # fmt: skip


def _largest_gaps(gap: torch.Tensor, sequences: torch.Tensor) -> dict[int, tuple[tuple[int, float], ...]]:
    """See `StepStats.gaps`; gap and sequences are `[N]`, a completion's rows in its tokens' order."""
    names, lengths = sequences.unique_consecutive(return_counts=True)
    found = {}
    for name, own in zip(names.tolist(), gap.split(lengths.tolist()), strict=True):
        sizes, at = own.abs().topk(min(GAPS, len(own)))
        at = at[sizes >= LEAST_GAP].sort().values
        if len(at):
            found[name] = tuple(zip(at.tolist(), own[at].tolist(), strict=True))
    return found
