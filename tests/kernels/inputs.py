"""Random inputs and error measures that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.layout import Layout


@dataclass(frozen=True, slots=True)
class HeadCase:
    """One set of inputs of the head, made in bf16-representable values so that every dtype sees the same ones."""

    tokens: int = 77
    width: int = 48
    vocab: int = 1000
    temperature: float = 0.7
    softcap: float | None = None
    rank: int = 0
    masked: bool = False
    entropy: float = 0.01
    spread: float = 0.4  # standard deviation of the weight: how peaked the softmax is

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """hidden, weight, targets, valid, advantage and, with a rank, a and b; leaves that want gradients."""
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        wide = torch.promote_types(dtype, torch.float32)
        made = {
            "hidden": normal(self.tokens, self.width).to(dtype).requires_grad_(),
            "weight": (normal(self.vocab, self.width) * self.spread).to(dtype).requires_grad_(),
            "targets": torch.randint(0, self.vocab, (self.tokens,), generator=generator),
            "valid": torch.rand(self.tokens, generator=generator) < 0.6,
            "advantage": normal(self.tokens).to(torch.float64),
        }
        made["targets"][0] = self.vocab - 1
        made["advantage"][::5] = 0
        if self.rank:
            made["a"] = (normal(self.rank, self.width) * 0.3).to(wide).requires_grad_()
            made["b"] = (normal(self.vocab, self.rank) * 0.3).to(wide).requires_grad_()
        return made


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance over norm (both L2), in float64; the plain distance where the wanted norm is 0."""
    got, want = got.detach().double(), want.detach().double()
    difference, size = (got - want).norm(), want.norm()
    return float(difference / size) if size > 0 else float(difference)


def tree_layout() -> Layout:
    """Header, prompts, completions and a second root, with an empty and a one-token segment."""
    return Layout.from_lengths([9, 5, 7, 3, 0, 4, 1, 6, 11], [-1, 0, 0, 1, 1, 2, 2, -1, 7])


def attention_inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 3
) -> list[torch.Tensor]:
    """q, k and v that want gradients, and an upstream gradient for the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, head_dim), (tokens, kv_heads, head_dim), (tokens, kv_heads, head_dim)]
    made = [torch.randn(s, generator=generator).bfloat16().to(dtype).requires_grad_() for s in shapes]
    return [*made, torch.randn(shapes[0], generator=generator).bfloat16().to(dtype)]
