"""Writing LoRA factors into a loaded vLLM model, in place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from engine.types import Factors


@dataclass(frozen=True, slots=True)
class Target:
    """One of vLLM's linear modules and the layers of the original model that it holds, stacked in this order."""

    module: nn.Module
    parts: tuple[str, ...]


def find_targets(model: nn.Module, names: Sequence[str]) -> list[Target]:
    """The modules of vLLM's model that hold the layers `names` (as transformers spells them).

    Raises LookupError with the list of names that have no place, since such a factor would do nothing, silently.
    """
    wanted, targets = set(names), []
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        prefix, _, leaf = name.rpartition(".")
        parts = tuple(f"{prefix}.{part}" for part in packed.get(leaf, (leaf,)))
        if wanted.intersection(parts):
            targets.append(Target(module, parts))
            wanted.difference_update(parts)
    if wanted:
        raise LookupError(f"factors without a place in vLLM's model: {', '.join(sorted(wanted))}")
    return targets


class MergedInstall:
    """W0 + s B A, computed in fp32 from a pristine copy of W0 and written over vLLM's fused parameters.

    W0 is read from the model's folder, since vLLM's CPU build repacks its weights at load and keeps no plain copy.
    """

    def __init__(self, model: nn.Module, model_dir: str, names: Sequence[str]) -> None:
        self._targets = find_targets(model, names)
        parts = [part for target in self._targets for part in target.parts]
        self._pristine = read_weights(Path(model_dir), [f"{part}.weight" for part in parts])
        self._scratch: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def write(self, factors: Factors, scale: float) -> None:
        """Install the factors; modules that have none of their own part get W0 there."""
        for index, target in enumerate(self._targets):
            pristine = [self._pristine[f"{part}.weight"] for part in target.parts]
            weight = target.module.weight
            assert isinstance(weight, torch.Tensor)
            # Each target has its own scratch: the CPU build's packed kernels may go on reading what they were given.
            rows = sum(w.shape[0] for w in pristine)
            merged = self._scratch.setdefault(index, torch.empty(rows, pristine[0].shape[1]))
            start = 0
            for part, base in zip(target.parts, pristine, strict=True):
                rows_of_part = merged[start : start + base.shape[0]]
                if part in factors:
                    a, b = factors[part]
                    torch.addmm(base, b, a, alpha=scale, out=rows_of_part)
                else:
                    rows_of_part.copy_(base)
                start += base.shape[0]
            if weight.numel() == 0:
                _repack(target.module, merged.to(weight.dtype))
            else:
                weight.copy_(merged)  # the storage stays, so CUDA graphs stay valid


def _repack(module: nn.Module, weight: torch.Tensor) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    module.weight = nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=True)


def read_weights(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """fp32 copies of the named tensors of a safetensors folder, in one file or sharded.

    Raises LookupError naming the tensors that are not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            where = dict.fromkeys(file.keys(), "model.safetensors")
    missing = [name for name in names if name not in where]
    if missing:
        raise LookupError(f"{folder} has no tensor {', '.join(missing)}")
    weights: dict[str, torch.Tensor] = {}
    for file_name in sorted({where[name] for name in names}):
        with safe_open(folder / file_name, framework="pt") as file:
            weights |= {n: file.get_tensor(n).float() for n in names if where[n] == file_name}
    return weights
