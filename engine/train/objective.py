"""The other three choices of the loss, and its two coefficients, as tables of pure functions on flat tensors.

Notation: new, old and sampled are log-probs `[N]` of the trained tokens under the policy that is trained, the policy
at the step's start, and the sampler; r = exp(new - old), rho = exp(old - sampled). The step's loss is

    sum_t w_t (c_t l_t + beta k_t) - eta sum_t H_t / N

with l from `OBJECTIVES`, c from `CORRECTIONS`, w from `AGGREGATES`, k from `KLS`. The weights w are made from counts of
the whole optimizer step before any micro-batch is cut, so gradients do not depend on how it is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of some completions; every tensor is `[N]`, and completions are whole for gspo and
    sequence_mask."""

    new: torch.Tensor
    old: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor
    sequences: torch.Tensor
    """int64: equal for the tokens of one completion."""

    def at(self, rows: slice | torch.Tensor) -> Tokens:
        """The tokens of some rows."""
        return Tokens(self.new[rows], self.old[rows], self.sampled[rows], self.advantages[rows], self.sequences[rows])


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The four choices and their numbers; `[loss]` of a recipe says them."""

    objective: str = "clip"
    correction: str = "none"
    aggregate: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    """c of dual clip, above 1; 0 is off."""
    delta: float = 0.0
    """Largest ratio in the unclipped branch; 0 is off."""
    ratio_low: float = 0.0
    """cispo's lower bound, an absolute ratio."""
    ratio_high: float = 5.0
    """cispo's upper bound, an absolute ratio."""
    correction_low: float = 0.5
    correction_high: float = 2.0
    constant_length: int = 0
    """Tokens that `aggregate = "constant"` divides a completion's sum by."""
    kl: str = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0


Loss = tuple[torch.Tensor, torch.Tensor]
"""Per-token loss `[N]`, and where the clip changed its value: -1 at the low bound, +1 at the high one, 0 elsewhere."""


def clip(tokens: Tokens, spec: LossSpec) -> Loss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476).

    `dual_clip` c bounds the loss of a negative advantage by -c A (arXiv 1912.09729); `delta` bounds r in the
    unclipped branch (INTELLECT-2, arXiv 2505.07291).
    """
    ratio, advantage = (tokens.new - tokens.old).exp(), tokens.advantages
    free = -(ratio.clamp(max=spec.delta) if spec.delta else ratio) * advantage
    bound = -ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage
    loss = torch.maximum(free, bound)
    if spec.dual_clip:
        loss = torch.where(advantage < 0, torch.minimum(loss, -spec.dual_clip * advantage), loss)
    binds = bound > free
    return loss, torch.where(binds, torch.where(ratio > 1, 1, -1), 0)


def importance_sampling(tokens: Tokens, spec: LossSpec) -> Loss:
    """-r A, without a clip (Tinker's importance_sampling)."""
    return -(tokens.new - tokens.old).exp() * tokens.advantages, torch.zeros_like(tokens.sequences)


def cispo(tokens: Tokens, spec: LossSpec) -> Loss:
    """-sg(clip(r, low, high)) A new, both bounds absolute ratios (MiniMax-M1, arXiv 2506.13585)."""
    ratio = (tokens.new - tokens.old).exp().detach()
    bounded = ratio.clamp(spec.ratio_low, spec.ratio_high)
    clipped = (ratio > spec.ratio_high).long() - (ratio < spec.ratio_low).long()
    return -bounded * tokens.advantages * tokens.new, clipped


def gspo(tokens: Tokens, spec: LossSpec) -> Loss:
    """`clip` with the completion's ratio exp(mean(new - old)); the token form of its gradient (arXiv 2507.18071)."""
    log_ratio = tokens.new - tokens.old
    sequence_ratio = _sequence_mean(log_ratio.detach(), tokens.sequences)
    log_token_form = sequence_ratio + tokens.new - tokens.new.detach()
    return clip(replace(tokens, new=log_token_form, old=torch.zeros_like(log_token_form)), spec)


def reinforce(tokens: Tokens, spec: LossSpec) -> Loss:
    """-A new (Williams 1992)."""
    return -tokens.advantages * tokens.new, torch.zeros_like(tokens.sequences)


OBJECTIVES: dict[str, Callable[[Tokens, LossSpec], Loss]] = {
    "clip": clip,
    "importance_sampling": importance_sampling,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
}


def no_correction(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
    """1: trainer and sampler are taken for the same policy."""
    return torch.ones_like(tokens.old)


def truncate(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
    """min(rho, high): truncated importance sampling (TIS)."""
    return (tokens.old - tokens.sampled).exp().clamp(max=spec.correction_high)


def mask(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
    """rho inside [low, high], 0 outside (IcePop)."""
    rho = (tokens.old - tokens.sampled).exp()
    return torch.where((rho >= spec.correction_low) & (rho <= spec.correction_high), rho, 0.0)


def sequence_mask(tokens: Tokens, spec: LossSpec) -> torch.Tensor:
    """rho where the completion's geometric mean of rho is inside [low, high], 0 for the whole completion outside."""
    log_rho = tokens.old - tokens.sampled
    mean = _sequence_mean(log_rho, tokens.sequences).exp()
    return torch.where((mean >= spec.correction_low) & (mean <= spec.correction_high), log_rho.exp(), 0.0)


CORRECTIONS: dict[str, Callable[[Tokens, LossSpec], torch.Tensor]] = {
    "none": no_correction,
    "truncate": truncate,
    "mask": mask,
    "sequence_mask": sequence_mask,
}


def per_token(length: int, tokens: int, completions: int, spec: LossSpec) -> float:
    """1 / all trainable tokens of the step (DAPO, arXiv 2503.14476)."""
    return 1.0 / tokens


def per_sequence(length: int, tokens: int, completions: int, spec: LossSpec) -> float:
    """1 / (tokens of the completion x completions of the step) (GRPO, arXiv 2402.03300)."""
    return 1.0 / (length * completions)


def per_constant(length: int, tokens: int, completions: int, spec: LossSpec) -> float:
    """1 / (a constant x completions of the step) (Dr.GRPO, arXiv 2503.20783)."""
    return 1.0 / (spec.constant_length * completions)


AGGREGATES: dict[str, Callable[[int, int, int, LossSpec], float]] = {
    "token": per_token,
    "sequence": per_sequence,
    "constant": per_constant,
}
"""The weight of each token of a completion, from its length and the step's counts of tokens and completions."""


def k1(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """new - reference: unbiased, its plain derivative is not the KL's (Schulman, Approximating KL divergence)."""
    return new - reference


def k2(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """(new - reference)^2 / 2."""
    return (new - reference).square() / 2


def k3(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """exp(q) - q - 1 with q = reference - new: unbiased and never negative."""
    return torch.expm1(reference - new) - (reference - new)


KLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

SEQUENCE_LEVEL = frozenset({"gspo", "sequence_mask"})
"""Choices that need every token of a completion at once."""


def _sequence_mean(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """`[N]`: each token gets the mean of `values` over its completion."""
    _, index = sequences.unique(return_inverse=True)
    count = int(index.max()) + 1 if index.numel() else 0
    sums = values.new_zeros(count).index_add(0, index, values)
    lengths = values.new_zeros(count).index_add(0, index, torch.ones_like(values))
    return (sums / lengths)[index]
