"""Full fine-tuning: the model's own weights are trained, through fp32 masters where they are narrower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from engine.train.lora import full_match


class FullWeights:
    """The trained weights of a model, by parameter name; tied weights stand once."""

    def __init__(self, model: nn.Module, freeze: Sequence[str], *, keep_base: bool) -> None:
        """keep_base: hold a copy of what the weights are now, for `disabled`.

        Raises LookupError for a name in `freeze` that matches no parameter.
        """
        named = dict(model.named_parameters())
        frozen = match_frozen(list(named), freeze)
        self._weights = {name: weight for name, weight in named.items() if name not in frozen}
        for name, weight in named.items():
            weight.requires_grad_(name not in frozen)
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        self._base = {n: w.detach().clone() for n, w in self._weights.items()} if keep_base else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The fp32 masters, in the order of the model's parameters."""
        return list(self._masters.values())

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The fp32 masters by parameter name."""
        return dict(self._masters)

    @property
    def scale(self) -> float:
        """Nothing is scaled on its way to a sampler."""
        return 1.0

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """What a sampler needs: each weight as the model computes with it; the live tensors, not copies."""
        return {name: (weight.detach(),) for name, weight in self._weights.items()}

    @torch.no_grad()
    def updated(self) -> None:
        """After an optimizer step: the model's weights follow their masters."""
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                self._weights[name].copy_(master)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model as it was before training, for as long as the context lasts."""
        if self._base is None:
            raise RuntimeError("the base weights were not kept: they are where the loss has a KL term")
        now = {name: weight.data for name, weight in self._weights.items()}
        try:
            for name, weight in self._weights.items():
                weight.data = self._base[name]
            yield
        finally:
            for name, weight in self._weights.items():
                weight.data = now[name]


def _master(weight: nn.Parameter) -> nn.Parameter:
    """The weight itself in fp32; else an fp32 copy that gathers the weight's gradient in fp32 as it is made."""
    if weight.dtype == torch.float32:
        return weight
    master = nn.Parameter(weight.detach().float())
    weight.register_post_accumulate_grad_hook(partial(_hand_over, master))
    return master


def _hand_over(master: nn.Parameter, weight: torch.Tensor) -> None:
    assert weight.grad is not None
    gradient = weight.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    weight.grad = None


def match_frozen(names: Sequence[str], freeze: Sequence[str]) -> set[str]:
    """The names that a pattern names: itself, what it is a dotted prefix of, or what it matches as an expression.

    Raises LookupError for a pattern that matches none, or where nothing is left.
    """
    found: set[str] = set()
    for pattern in freeze:
        hits = [n for n in names if n == pattern or n.startswith(f"{pattern}.") or full_match(pattern, n)]
        if not hits:
            raise LookupError(f"full.freeze: {pattern!r} matches no parameter of the model, such as {names[0]}")
        found.update(hits)
    if len(found) == len(names):
        raise LookupError(f"full.freeze = {list(freeze)}: every parameter is frozen, nothing would be trained")
    return found
