"""LoRA on the linear layers of a transformers model: fp32 factors beside frozen weights.

Layers that read the same input (q, k and v; gate and up) are computed as one group by `kernels.lora`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from kernels.lora import lora_linears

SAME_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


HEAD = "lm_head"
"""The output projection's name in transformers' causal models; `kernels.lm_head` computes it, not `LoraLinear`."""


class _Group:
    """Layers that read the same input: the first one asked computes all, the others are handed their output."""

    def __init__(self, scale: float) -> None:
        self.layers: list[LoraLinear] = []
        self.scale = scale
        self.enabled = True
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def output(self, layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
        index = self.layers.index(layer)
        if self._input is not x or index not in self._outputs:
            outputs = lora_linears(
                x.flatten(0, -2),
                [other.base.weight for other in self.layers],
                [(other.lora_a, other.lora_b) if self.enabled else None for other in self.layers],
                self.scale,
                biases=[other.base.bias for other in self.layers],
            )
            self._input, self._outputs = x, dict(enumerate(outputs))
        out = self._outputs.pop(index).view(*x.shape[:-1], -1)
        if not self._outputs:
            self._input = None
        return out


class LoraLinear(nn.Module):
    """y = x W^T + scale (x A^T) B^T with W frozen; `lora_a` `[rank, in]` and `lora_b` `[out, rank]` are fp32."""

    def __init__(self, base: nn.Linear, rank: int, group: _Group) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))
        self._group = group
        group.layers.append(self)

    @property
    def enabled(self) -> bool:
        """Whether the low-rank part counts at present."""
        return self._group.enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        return self._group.output(self, x)


class Adapter:
    """The LoRA layers of a model, in the order of its modules."""

    def __init__(self, layers: dict[str, LoraLinear], groups: Sequence[_Group], scale: float) -> None:
        self.layers = layers
        self.scale = scale
        self._groups = groups

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every factor: A then B, layer by layer."""
        return list(self.named_parameters.values())

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every factor by name: `<module>.lora_a`, then `<module>.lora_b`, layer by layer."""
        pairs = ((name, layer.lora_a, layer.lora_b) for name, layer in self.layers.items())
        return {f"{name}.{leaf}": p for name, a, b in pairs for leaf, p in (("lora_a", a), ("lora_b", b))}

    def factors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """(A, B) by module name; the live tensors, not copies."""
        return {name: (layer.lora_a.detach(), layer.lora_b.detach()) for name, layer in self.layers.items()}

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """What a sampler needs: (A, B) by module name; the live tensors, not copies."""
        return dict(self.factors())

    def updated(self) -> None:
        """After an optimizer step: nothing to do, the factors are their own masters."""

    def head_factors(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """(A, B, scale) of the output projection, if the adapter has it and is not disabled; with gradient."""
        head = self.layers.get(HEAD)
        return (head.lora_a, head.lora_b, self.scale) if head is not None and head.enabled else None

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model alone, for as long as the context lasts."""
        for group in self._groups:
            group.enabled = False
        try:
            yield
        finally:
            for group in self._groups:
                group.enabled = True


def add_lora(model: nn.Module, targets: Sequence[str], *, rank: int, scale: float, seed: int) -> Adapter:
    """Freeze the model and put LoRA on every linear layer that a target names.

    A starts as PEFT's does (uniform, Kaiming with a = sqrt 5), B at zero. Raises LookupError for a target that
    matches no linear layer.
    """
    model.requires_grad_(False)
    names = match_targets(model, targets)
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, LoraLinear] = {}
    groups: dict[tuple[str, int | str], _Group] = {}
    for name in names:
        parent_name, _, leaf = name.rpartition(".")
        kind = next((i for i, same in enumerate(SAME_INPUT) if leaf in same), leaf)
        group = groups.setdefault((parent_name, kind), _Group(scale))
        parent = model.get_submodule(parent_name)
        base = getattr(parent, leaf)
        layer = LoraLinear(base, rank, group)
        bound = 1 / math.sqrt(base.in_features)
        with torch.no_grad():
            layer.lora_a.copy_(torch.empty(layer.lora_a.shape).uniform_(-bound, bound, generator=generator))
        setattr(parent, leaf, layer)
        layers[name] = layer
    return Adapter(layers, list(groups.values()), scale)


def match_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that a target names: its name, a dotted suffix of it, or a regular expression for it.

    Raises LookupError for a target that matches none, with the nearest layer name.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    matched: set[str] = set()
    for target in targets:
        hits = [n for n in linear if n == target or n.endswith(f".{target}") or full_match(target, n)]
        if not hits:
            leaves = sorted({n.rpartition(".")[2] for n in linear})
            near = difflib.get_close_matches(target, leaves, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]}? Its linear layers: {', '.join(leaves)}" if near else ""
            raise LookupError(f"lora.targets: {target!r} matches no linear layer of the model{hint}")
        matched.update(hits)
    return [name for name in linear if name in matched]


def full_match(pattern: str, name: str) -> bool:
    """Whether the whole name matches; a pattern that is no expression matches nothing."""
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False  # a plain name that is no expression; unmatched targets are reported by the caller
