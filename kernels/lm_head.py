"""From hidden rows and the head's weight to log-prob and entropy of the sampled tokens, without the logits.

    raw   = hidden @ weight.T + scale * (hidden @ A.T) @ B.T          (LoRA on the head, optional)
    z     = softcap * tanh(raw / softcap) / temperature               (or raw / temperature)
    logprob = z[target] - logsumexp(z)        entropy = -sum(softmax(z) * log_softmax(z))

With a = dL/dlogprob and b = dL/dentropy of a row, and p = softmax(z), the gradient has the closed form

    dL/dz = a * (onehot(target) - p) - b * p * (log p + entropy)

which is applied to the logits in place and multiplied with the weight chunk by chunk. `token_logprobs`
recomputes the logits in its backward; `token_loss` forms the gradient in the forward pass, so that each logit
is computed once.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from kernels.dispatch import pick

LossOfRows = Callable[[torch.Tensor, torch.Tensor, "slice | torch.Tensor"], torch.Tensor]
Lora = tuple[torch.Tensor, torch.Tensor, float]


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What stands between the matrix product and the softmax, checked."""

    temperature: float = 1.0
    softcap: float | None = None
    lora_scale: float = 0.0


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    lora: Lora | None = None,
    valid: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob (natural log) of each target and entropy (nats) of each row's distribution.

    hidden `[tokens, width]`, weight `[vocab, width]` of hidden's dtype, targets int64 `[tokens]`.
    temperature divides the logits after the soft-cap. lora: `(A [r, width], B [vocab, r], scale)`, typically
    fp32 masters; they are cast for the product and their gradients come back in their own dtype.
    valid: bool `[tokens]`; rows with False are never projected, their log-prob and entropy are 0, their
    target may be anything. impl: overrides the dispatch rule.

    Returns `(logprob [tokens], entropy [tokens])`, fp32 (float64 for float64 inputs), differentiable with
    respect to hidden, weight (only if it requires grad), A and B; the backward recomputes the logits in
    tiles. Raises ValueError for shapes, dtypes, devices or values that do not fit, UnsupportedError for an
    option that the implementation lacks.
    """
    options = _check(hidden, weight, targets, temperature, softcap, lora, valid)
    name = pick("lm_head", hidden, impl)
    a, b = (lora[0], lora[1]) if lora is not None else (None, None)
    return _module(name).logprobs(hidden, weight, a, b, targets, valid, options)


def token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    loss_of_rows: LossOfRows,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    lora: Lora | None = None,
    valid: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Any token-level loss on top of the head, its gradient formed during the forward pass.

    `loss_of_rows(logprob [n], entropy [n], rows)` returns the SUM of the loss of those n rows, a scalar; rows
    is a slice or an int64 tensor of row numbers into the token axis. It is called once a chunk of valid rows,
    with fresh leaves, so the loss of a row must not depend on other chunks' rows (a sequence-level ratio has
    to go through `token_logprobs`), and whatever else it closes over gets no gradient.

    The other arguments are those of `token_logprobs`. Returns `(loss, logprob [tokens], entropy [tokens])`;
    loss is a scalar, fp32 (float64 for float64 inputs), connected to hidden, to the LoRA factors and to the
    weight where they require grad, 0 if no row is valid. logprob and entropy are detached. Rows whose two
    coefficients are exactly zero are left out of the gradient's matrix product. The backward only scales, so
    it can run once.

    Raises what `token_logprobs` raises, ValueError if loss_of_rows does not return a scalar tensor, and
    whatever loss_of_rows raises.
    """
    options = _check(hidden, weight, targets, temperature, softcap, lora, valid)
    name = pick("lm_head", hidden, impl)
    a, b = (lora[0], lora[1]) if lora is not None else (None, None)
    return _module(name).loss(hidden, weight, a, b, targets, valid, options, loss_of_rows)


def workspace_bytes(rows: int, weight: torch.Tensor, impl: str | None = None) -> int:
    """Memory that `token_loss` takes for this many rows beyond its inputs and outputs, weight `[vocab, width]`.

    impl: overrides the dispatch rule. The weight's own fp32 gradient is counted where it requires one.
    """
    own = weight.numel() * 4 if weight.requires_grad else 0
    return own + _module(pick("lm_head", weight, impl)).workspace_bytes(rows, weight)


class _Implementation(Protocol):
    """What the module of an implementation offers."""

    workspace_bytes: Callable[[int, torch.Tensor], int]

    logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _module(name: str) -> _Implementation:
    """`kernels.lm_head_<name>`, imported when first needed: Triton's needs Triton."""
    return cast(_Implementation, importlib.import_module(f"kernels.lm_head_{name}"))


def row_coefficients(
    loss_of_rows: LossOfRows, logprob: torch.Tensor, entropy: torch.Tensor, rows: slice | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call the objective on fresh leaves: `(loss, dL/dlogprob [n], dL/dentropy [n])`, all detached."""
    with torch.enable_grad():
        leaves = (logprob.detach().clone().requires_grad_(), entropy.detach().clone().requires_grad_())
        value = loss_of_rows(leaves[0], leaves[1], rows)
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise ValueError("token_loss: loss_of_rows must return a scalar tensor, the sum over its rows")
        if not value.requires_grad:
            return value.detach(), torch.zeros_like(logprob), torch.zeros_like(entropy)
        grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return value.detach(), grads[0], grads[1]


def chunks_of_rows(tokens: int, valid: torch.Tensor | None, size: int) -> list[slice | torch.Tensor]:
    """The rows to project, `size` at a time: slices where all are valid, else their int64 numbers."""
    if valid is None:
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
    return [part for part in valid.nonzero().flatten().split(size) if len(part)]


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    lora: Lora | None,
    valid: torch.Tensor | None,
) -> HeadOptions:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "lm_head: hidden [tokens, width] and weight [vocab, width]; got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise ValueError(
            f"lm_head: weight is {weight.dtype} on {weight.device}, hidden {hidden.dtype} on {hidden.device}"
        )
    tokens, (vocab, width) = hidden.shape[0], weight.shape
    if targets.shape != (tokens,) or targets.dtype != torch.int64 or targets.device != hidden.device:
        raise ValueError(
            f"lm_head: targets must be int64 [{tokens}] on {hidden.device}, got {targets.dtype} "
            f"{tuple(targets.shape)} on {targets.device}"
        )
    if valid is not None and (valid.shape != (tokens,) or valid.dtype != torch.bool or valid.device != hidden.device):
        raise ValueError(f"lm_head: valid must be bool [{tokens}] on {hidden.device}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"lm_head: temperature must be finite and above 0, got {temperature}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"lm_head: softcap must be finite and above 0, got {softcap}")
    if lora is not None:
        a, b, _ = lora
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != width or b.shape != (vocab, a.shape[0]):
            raise ValueError(f"lm_head: lora A [r, {width}] and B [{vocab}, r]; got {tuple(a.shape)}, {tuple(b.shape)}")
        if a.device != hidden.device or b.device != hidden.device:
            raise ValueError(f"lm_head: lora factors must be on {hidden.device}")
    scored = targets if valid is None else targets[valid]
    # On CUDA the check would wait for the device; the kernels there compare columns and never index by a
    # target.
    if hidden.device.type == "cpu" and scored.numel():
        low, high = int(scored.min()), int(scored.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"lm_head: targets must lie in 0..{vocab - 1}, got {low}..{high}; mask rows with valid=")
    return HeadOptions(float(temperature), softcap, float(lora[2]) if lora is not None else 0.0)
