"""The head's two autograd nodes, over chunks of rows; what happens to one chunk is an implementation's own.

`Logprobs` keeps two numbers a row and lets its backward recompute; `Loss` asks the objective for its two
coefficients a row while the chunk's logits are still at hand, so that every logit is computed once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.lm_head import HeadOptions, LossOfRows, chunks_of_rows, row_coefficients


@dataclass(slots=True)
class Rows:
    """Statistics of a chunk: the reference point of the kept exponentials by tile, and per row the rest.

    tile_peak `[tiles, rows]`; peak + log_sum is a row's logsumexp, kept apart so that a large common offset
    of its logits costs no digits; logprob and entropy `[rows]`.
    """

    tile_peak: torch.Tensor
    peak: torch.Tensor
    log_sum: torch.Tensor
    logprob: torch.Tensor
    entropy: torch.Tensor

    def pick(self, index: torch.Tensor) -> Rows:
        """The statistics of some rows."""
        per_row = (self.peak, self.log_sum, self.logprob, self.entropy)
        return Rows(self.tile_peak[:, index], *(s[index] for s in per_row))


def combine(tile_peak: torch.Tensor, total: torch.Tensor, moment: torch.Tensor, chosen: torch.Tensor) -> Rows:
    """A row's log-prob and entropy from its tiles.

    For tile j of the vocabulary and z the row's logits there: tile_peak[j] = max(z), total[j] = sum(exp(z -
    tile_peak[j])), moment[j] = sum(exp(z - tile_peak[j]) * (z - tile_peak[j])), each `[tiles, rows]`.
    chosen `[rows]`: the logit of the target.
    """
    peak = tile_peak.amax(dim=0)
    weight = torch.exp(tile_peak - peak)
    log_sum = (total * weight).sum(dim=0).log_()
    # Mean of z - peak under the softmax; the entropy is the logsumexp minus the mean logit.
    mean = ((moment + (tile_peak - peak) * total) * weight).sum(dim=0) * torch.exp(-log_sum)
    return Rows(tile_peak, peak, log_sum, (chosen - peak) - log_sum, log_sum - mean)


@dataclass(slots=True)
class Sums:
    """The gradients that are asked for, gathered over chunks in fp32 or wider; None where nobody asked."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None

    def add_low_rank(self, x: torch.Tensor, d_u: torch.Tensor, a: torch.Tensor, d_x: torch.Tensor | None) -> None:
        """What `d_u = dL/d(x A^T)` contributes to A and to the hidden rows."""
        if self.a is not None:
            self.a.addmm_(d_u.T, x.to(d_u.dtype))
        if d_x is not None:
            d_x.addmm_(d_u, a)


class HeadKernel(ABC):
    """One implementation's weight, LoRA factors and reused buffers for one call.

    keep: the logits of a chunk stay, in whatever form, from `statistics` until `gradient`.
    """

    chunk: int  # rows at a time

    def __init__(
        self,
        weight: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        options: HeadOptions,
        compute: torch.dtype,
        *,
        keep: bool,
    ) -> None:
        self.weight, self.options, self.keep, self.dtype = weight.detach(), options, keep, compute
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.a = a.detach().to(self.wide) if a is not None else None
        self.b = b.detach().to(self.wide) if b is not None else None

    @property
    def divisor(self) -> float:
        """What the raw logits are divided by first: the soft-cap, or else the temperature."""
        return self.options.softcap if self.options.softcap is not None else self.options.temperature

    def prepare(self, hidden: torch.Tensor, rows: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A chunk's hidden rows in the compute dtype, and their product with A in the wide one."""
        x = hidden.detach()[rows]
        return x.to(self.dtype), None if self.a is None else x.to(self.wide) @ self.a.T

    @abstractmethod
    def statistics(self, x: torch.Tensor, u: torch.Tensor | None, target: torch.Tensor) -> Rows:
        """One pass over the vocabulary for the rows x `[rows, width]`, u `[rows, r]`, target `[rows]`."""

    @abstractmethod
    def gradient(
        self,
        x: torch.Tensor,
        u: torch.Tensor | None,
        stats: Rows,
        target: torch.Tensor,
        coefficients: tuple[torch.Tensor, torch.Tensor],
        rows: slice | torch.Tensor,
        sums: Sums,
    ) -> None:
        """Add the chunk's gradient to the sums, from `(dL/dlogprob, dL/dentropy)`, each `[rows]`."""


def _new_sums(
    needs: tuple[bool, ...],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
) -> Sums:
    wide = torch.promote_types(hidden.dtype, torch.float32)

    def zeros(like: torch.Tensor | None, need: bool) -> torch.Tensor | None:
        return torch.zeros(like.shape, dtype=wide, device=like.device) if like is not None and need else None

    # A hidden row gets its whole gradient from one chunk: it needs no wide sum.
    own = torch.zeros_like(hidden) if needs[0] else None
    return Sums(own, zeros(weight, needs[1]), zeros(a, needs[2]), zeros(b, needs[3]))


class Logprobs(torch.autograd.Function):
    """hidden, weight, A, B -> log-prob and entropy; the backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        targets: torch.Tensor,
        valid: torch.Tensor | None,
        options: HeadOptions,
        kernel: Callable[..., HeadKernel],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = hidden.shape[0]
        head = kernel(weight, a, b, options, tokens, keep=False)
        logprob, entropy, peak, log_sum = torch.zeros(4, tokens, dtype=head.wide, device=hidden.device)
        for rows in chunks_of_rows(tokens, valid, head.chunk):
            stats = head.statistics(*head.prepare(hidden, rows), targets[rows])
            logprob[rows], entropy[rows] = stats.logprob, stats.entropy
            peak[rows], log_sum[rows] = stats.peak, stats.log_sum
        ctx.save_for_backward(hidden, weight, a, b, targets, valid, peak, log_sum, logprob, entropy)
        ctx.options, ctx.kernel = options, kernel
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, a, b, targets, valid, peak, log_sum, logprob, entropy = ctx.saved_tensors
        tokens = hidden.shape[0]
        head = ctx.kernel(weight, a, b, ctx.options, tokens, keep=False)
        sums = _new_sums(ctx.needs_input_grad, hidden, weight, a, b)
        for rows in chunks_of_rows(tokens, valid, head.chunk):
            stats = Rows(peak[None, rows], peak[rows], log_sum[rows], logprob[rows], entropy[rows])
            coefficients = (upstream[0][rows], upstream[1][rows])
            head.gradient(*head.prepare(hidden, rows), stats, targets[rows], coefficients, rows, sums)
        wide = zip((sums.hidden, sums.weight, sums.a, sums.b), (hidden, weight, a, b), strict=True)
        return *(None if g is None else g.to(like.dtype) for g, like in wide), None, None, None, None


class Loss(torch.autograd.Function):
    """hidden, weight, A, B -> loss, with the gradient formed here and only scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        targets: torch.Tensor,
        valid: torch.Tensor | None,
        options: HeadOptions,
        kernel: Callable[..., HeadKernel],
        loss_of_rows: LossOfRows,
        grad_mode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = hidden.shape[0]
        needs = tuple(grad_mode and need for need in ctx.needs_input_grad)
        head = kernel(weight, a, b, options, tokens, keep=any(needs))
        sums = _new_sums(needs, hidden, weight, a, b)
        logprob, entropy = torch.zeros(2, tokens, dtype=head.wide, device=hidden.device)
        loss = torch.zeros((), dtype=head.wide, device=hidden.device)
        for rows in chunks_of_rows(tokens, valid, head.chunk):
            x, u = head.prepare(hidden, rows)
            stats = head.statistics(x, u, targets[rows])
            logprob[rows], entropy[rows] = stats.logprob, stats.entropy
            value, for_logprob, for_entropy = row_coefficients(loss_of_rows, stats.logprob, stats.entropy, rows)
            loss += value
            if any(needs):
                head.gradient(x, u, stats, targets[rows], (for_logprob, for_entropy), rows, sums)
        ctx.grads = (sums.hidden, sums.weight, sums.a, sums.b)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (hidden, weight, a, b))
        ctx.mark_non_differentiable(logprob, entropy)
        return loss, logprob, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("token_loss: its gradient was formed in the forward pass and can be used only once")
        grads, ctx.grads = ctx.grads, None
        # Scaled before the cast, so that a sum kept in fp32 is rounded once.
        scaled = (
            None if g is None else g.mul_(upstream[0]).to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None, None
