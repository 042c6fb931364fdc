"""The oracle of the LoRA linears: the formula, differentiated by autograd."""

from __future__ import annotations

import torch

from kernels.lora import Factors


def linears(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    factors: tuple[Factors | None, ...],
    scale: float,
    biases: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, ...]:
    """See `kernels.lora.lora_linears`; products in x's dtype, as PEFT does them."""
    outputs = []
    for weight, factor, bias in zip(weights, factors, biases, strict=True):
        y = torch.nn.functional.linear(x, weight, bias)
        if factor is not None:
            y = y + (x @ factor[0].to(x.dtype).T) @ factor[1].to(x.dtype).T * scale
        outputs.append(y)
    return tuple(outputs)
