"""The loss of some rows: the choices of a recipe put together, for any cut of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.train.objective import AGGREGATES, CORRECTIONS, KLS, OBJECTIVES, LossSpec, Tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of the rows of a micro-batch before its forward; every tensor is `[N]`."""

    sampled: torch.Tensor
    advantages: torch.Tensor
    sequences: torch.Tensor
    weights: torch.Tensor
    """From `row_weights`: the aggregate's, made for the whole step."""
    step_tokens: int
    """Trainable tokens of the whole optimizer step."""
    old: torch.Tensor | None = None
    """None where the step's start is now: the ratio is 1 and carries the gradient."""
    reference: torch.Tensor | None = None
    """Log-probs under the adapter-free base, where the KL coefficient is not 0."""


def loss_of_rows(
    new: torch.Tensor, entropy: torch.Tensor, rows: Rows, spec: LossSpec, at: slice | torch.Tensor
) -> torch.Tensor:
    """The scalar loss of the rows `at`, whose log-probs and entropies are `new` and `entropy`.

    Sums over disjoint rows add up to the step's loss.
    """
    tokens = tokens_of(new, rows, at)
    loss, _ = OBJECTIVES[spec.objective](tokens, spec)
    loss = loss * CORRECTIONS[spec.correction](tokens, spec)
    if spec.kl_coefficient and rows.reference is not None:
        loss = loss + spec.kl_coefficient * KLS[spec.kl](new, rows.reference[at])
    total = (rows.weights[at] * loss).sum()
    return total - spec.entropy_coefficient * entropy.sum() / rows.step_tokens


def tokens_of(new: torch.Tensor, rows: Rows, at: slice | torch.Tensor) -> Tokens:
    """The rows as the choices see them."""
    old = new.detach() if rows.old is None else rows.old[at]
    return Tokens(new, old, rows.sampled[at], rows.advantages[at], rows.sequences[at])


def row_weights(lengths: list[int], spec: LossSpec, step_tokens: int, step_completions: int) -> torch.Tensor:
    """`[sum(lengths)]` fp32: the aggregate's weight of every token of completions of these lengths."""
    weight = AGGREGATES[spec.aggregate]
    values = [weight(n, step_tokens, step_completions, spec) for n in lengths]
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
