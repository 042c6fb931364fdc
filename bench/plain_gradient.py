"""The work of a benchmarked step, and its gradient computed plainly: one sequence at a time, no kernel of ours."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.recipe import Lora
from engine.types import Completion, Graded
from sandbox import Verdict


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens and rewards of a step, a row a group."""

    prompts: list[tuple[int, ...]]
    completions: list[list[tuple[int, ...]]]
    rewards: list[list[float]]

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(len(ids) for group in self.completions for ids in group)

    def graded(self) -> list[list[Graded]]:
        """As our trainer takes it."""
        return [
            [_graded(group, member, ids, reward, prompt) for member, (ids, reward) in enumerate(members)]
            for group, (prompt, members) in enumerate(zip(self.prompts, self._members(), strict=True))
        ]

    def _members(self) -> list[list[tuple[tuple[int, ...], float]]]:
        return [
            list(zip(group, rewards, strict=True))
            for group, rewards in zip(self.completions, self.rewards, strict=True)
        ]


def _graded(group: int, member: int, ids: tuple[int, ...], reward: float, prompt: tuple[int, ...]) -> Graded:
    # The sampler's log-probs enter no loss without a correction: any number does.
    completion = Completion(str(group), group, member, prompt, ids, (-1.0,) * len(ids), "stop", 0, "")
    return Graded(completion, None, Verdict("AC", 1, 1), reward)


def make_work(model_dir: Path, prompt: int, groups: int, group_size: int, lengths: tuple[int, int]) -> Work:
    """Random ordinary tokens of the model's vocabulary, always the same for the same arguments."""
    special = set(AutoTokenizer.from_pretrained(model_dir, local_files_only=True).all_special_ids)
    vocabulary = AutoConfig.from_pretrained(model_dir, local_files_only=True).vocab_size
    ordinary = [i for i in range(vocabulary) if i not in special]
    source = random.Random(f"{prompt}/{groups}/{group_size}/{lengths}")
    return Work(
        prompts=[tuple(source.choices(ordinary, k=prompt)) for _ in range(groups)],
        completions=[
            [tuple(source.choices(ordinary, k=source.randint(*lengths))) for _ in range(group_size)]
            for _ in range(groups)
        ],
        # All different, so that every group has a signal.
        rewards=[[source.random() for _ in range(group_size)] for _ in range(groups)],
    )


def factor(layer: str, which: str, shape: torch.Size) -> torch.Tensor:
    """A factor's values, the same for every implementation: A uniform as LoRA starts, B small but not zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer}/{which}".encode()))
    if which == "A":
        return torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    return torch.empty(shape).normal_(std=0.01, generator=generator)


class PlainLora(torch.nn.Module):
    """PEFT's formula, written out: the base layer in its dtype, the factors in theirs, added and cast back."""

    def __init__(self, base: Any, layer: str, rank: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a = torch.nn.Parameter(factor(layer, "A", torch.Size((rank, base.in_features))).to(dtype))
        self.b = torch.nn.Parameter(factor(layer, "B", torch.Size((base.out_features, rank))).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        low = (x.to(self.a.dtype) @ self.a.T) @ self.b.T
        out: torch.Tensor = (self.base(x) + low * self.scale).to(x.dtype)
        return out


@torch.no_grad()
def move_frozen(model: Any, seed: int) -> None:
    """Change every weight of the projections by -2^-23, 0 or 2^-23 of itself, about a unit of fp32's last place."""
    source = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "proj" in name and "lora" not in name:
            units = torch.randint(-1, 2, weight.shape, generator=source)
            weight.add_(weight * units.to(weight.dtype), alpha=2.0**-23)


def plain_gradient(
    work: Work, model_dir: Path, lora: Lora, dtype: torch.dtype, moved: int | None = None
) -> torch.Tensor:
    """The factors' gradient, flat and in float64, of a plain model in `dtype` that sees each sequence alone.

    moved: a seed for `move_frozen`.
    """
    # transformers' eager softmax and its norms round to fp32 whatever the model's dtype: a float64 model needs others.
    attention = "sdpa" if dtype == torch.float64 else "eager"
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation=attention, local_files_only=True
    ).requires_grad_(False)
    if dtype == torch.float64:
        _widen_norms(model)
    if moved is not None:
        move_frozen(model, moved)
    wide = torch.promote_types(dtype, torch.float32)
    layers = []
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in lora.targets:
            layers.append(PlainLora(module, name, lora.rank, lora.scale, wide))
            setattr(model.get_submodule(parent), leaf, layers[-1])
    tokens = sum(len(ids) for group in work.completions for ids in group)
    for prompt, group, rewards in zip(work.prompts, work.completions, work.rewards, strict=True):
        mean = sum(rewards) / len(rewards)
        for ids, reward in zip(group, rewards, strict=True):
            logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.to(wide).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
            # On policy the ratio is 1 and no clip binds: the objective's gradient is A times that of the log-prob.
            (-(reward - mean) * logprobs.sum() / tokens).backward()
    return flat([(layer.a.grad, layer.b.grad) for layer in layers])


def _widen_norms(model: Any) -> None:
    """PyTorch's RMSNorm, which stays in float64, for the model's. Rotary tables are fp32 constants on all sides."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, norm)


def flat(pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]]) -> torch.Tensor:
    """Gradients of A and B, layer by layer, as one vector."""
    return torch.cat([g.double().flatten() for pair in pairs for g in pair if g is not None])
