"""Grouped LoRA linears with a closed-form backward: y_i = x W_i^T + bias_i + scale * (x A_i^T) B_i^T.

The linears of a group read the same x (q/k/v; gate/up; one alone for o and down). The weights are frozen.
With g_i = dL/dy_i and u_i = x A_i^T the gradients are

    dB_i = scale * g_i^T u_i      dA_i = scale * (g_i B_i)^T x      dx = sum_i g_i W_i + scale * (g_i B_i) A_i

so nothing but x and the small u_i is kept for the backward.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from kernels.dispatch import UnsupportedError, pick

Factors = tuple[torch.Tensor, torch.Tensor]


def lora_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    factors: Sequence[Factors | None],
    scale: float,
    *,
    biases: Sequence[torch.Tensor | None] | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Several frozen linears with LoRA on one input.

    x `[tokens, in]`; weights: W_i `[out_i, in]` of x's dtype; factors: for each weight `(A_i [r_i, in],
    B_i [out_i, r_i])` or None, typically fp32 masters: they are cast for the product and their gradients come
    back in their own dtype. scale: a Python float, alpha / r or alpha / sqrt(r). biases: `[out_i]` of x's
    dtype, or None.

    Returns one `[tokens, out_i]` in x's dtype for each weight, differentiable with respect to x, A_i and B_i.
    Raises ValueError where shapes, dtypes or devices do not fit, UnsupportedError when a weight or a bias
    requires grad: they are frozen here, in every implementation.
    """
    biases = biases if biases is not None else [None] * len(weights)
    _check(x, weights, factors, biases)
    name = pick("lora", x, impl)
    # Imported when first needed: Triton's module needs Triton.
    module = importlib.import_module(f"kernels.lora_{name}")
    outputs: tuple[torch.Tensor, ...] = module.linears(x, tuple(weights), tuple(factors), float(scale), tuple(biases))
    return outputs


def _check(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    factors: Sequence[Factors | None],
    biases: Sequence[torch.Tensor | None],
) -> None:
    if x.dim() != 2:
        raise ValueError(f"lora_linears: x must be [tokens, in], got {tuple(x.shape)}")
    if not len(weights) == len(factors) == len(biases) or not weights:
        raise ValueError(
            f"lora_linears: {len(weights)} weights, {len(factors)} factors and {len(biases)} biases; "
            "need as many of each"
        )
    for i, (weight, factor, bias) in enumerate(zip(weights, factors, biases, strict=True)):
        if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
            raise ValueError(f"lora_linears: weights[{i}] must be [out, {x.shape[1]}], got {tuple(weight.shape)}")
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(
                f"lora_linears: weights[{i}] is {weight.dtype} on {weight.device}, x {x.dtype} on {x.device}"
            )
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            raise UnsupportedError(f"weights[{i}]: weights and biases of lora_linears are frozen (requires_grad)")
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
            raise ValueError(f"lora_linears: biases[{i}] must be {x.dtype} [{weight.shape[0]}]")
        if factor is None:
            continue
        a, b = factor
        if a.dim() != 2 or a.shape[1] != x.shape[1] or b.shape != (weight.shape[0], a.shape[0]):
            raise ValueError(
                f"lora_linears: factors[{i}] must be A [r, {x.shape[1]}] and B [{weight.shape[0]}, r], "
                f"got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        if a.device != x.device or b.device != x.device:
            raise ValueError(f"lora_linears: factors[{i}] must be on {x.device}")
