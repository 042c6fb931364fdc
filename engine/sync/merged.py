"""Whole weights over vLLM's own, in place: W0 + s B A from factors, or weights as the trainer sent them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from engine.sync.places import Place, find_places
from engine.sync.shards import WHOLE, Share, share_of
from engine.sync.transport import Tensors


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a parameter and where their new values come from."""

    base: torch.Tensor | None
    """The original rows, or this worker's share of them; None where the trainer sends the whole weight."""
    sent: tuple[torch.Tensor, ...]
    """The trainer's factors, or its weight, or nothing where only the neighbours in the parameter are trained."""

    @property
    def shape(self) -> torch.Size:
        return self.sent[0].shape if self.base is None else self.base.shape


@dataclass(frozen=True, slots=True)
class _Write:
    place: Place
    parts: tuple[_Part, ...]
    shape: tuple[int, ...]


class MergedInstall:
    """Writes the tensors of `sent`, as they stand at each `write`, over vLLM's fused parameters.

    Factors become W0 + scale B A, computed in fp32 from a pristine copy of W0 that is read from the model's folder,
    since vLLM's CPU build repacks its weights at load and keeps no plain copy. Raises LookupError with the names of
    the tensors that have no place, and ValueError for a shape that is not the model's.
    """

    def __init__(self, model: nn.Module, model_dir: str, sent: Tensors, scale: float) -> None:
        self._scale = scale
        by_weight = {f"{name}.weight" if len(group) == 2 else name: group for name, group in sent.items()}
        places = find_places(model, list(by_weight))
        with_factors = {name for name, group in by_weight.items() if len(group) == 2}
        places = [_untied(p) if p.tied and with_factors.intersection(p.sources) else p for p in places]
        # A weight that is sent whole needs no original; the untrained neighbours of a trained layer do.
        pristine = _read_originals(Path(model_dir), places, whole=by_weight.keys() - with_factors)
        self._writes = [_plan(place, by_weight, pristine) for place in places]
        self._scratch = _scratch(self._writes)

    @torch.no_grad()
    def write(self) -> None:
        """Install what stands in the sent tensors now."""
        for write in self._writes:
            if self._scratch is None:
                value = torch.empty(write.shape, device=getattr(write.place.module, write.place.parameter).device)
            else:
                value = self._scratch[: math.prod(write.shape)].view(write.shape)
            start = 0
            for part in write.parts:
                end = start + part.shape[0]
                _fill(value[start:end], part, self._scale)
                start = end
            _put(write.place, value)


def _plan(place: Place, sent: Tensors, pristine: Mapping[str, torch.Tensor]) -> _Write:
    current = getattr(place.module, place.parameter)
    wholes = [pristine[name].shape if name in pristine else sent[name][0].shape for name in place.sources]
    parts = []
    for source, (name, whole) in enumerate(zip(place.sources, wholes, strict=True)):
        tensors = sent.get(name, ())
        if name in pristine and tensors:
            a, b = tensors
            if (b.shape[0], a.shape[1]) != whole or a.shape[0] != b.shape[1]:
                raise ValueError(f"{name} is {tuple(whole)}, its factors are {tuple(a.shape)}, {tuple(b.shape)}")
        share = share_of(place.module, place.parameter, source, wholes)
        parts.append(_part(pristine.get(name), tensors, share, current.device))
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    # vLLM pads a vocabulary with rows that no token has; every other parameter must fit exactly.
    rows = (shape[0], getattr(place.module, "num_embeddings_per_partition", shape[0]))
    fits = current.numel() == 0 or (current.shape[0] in rows and current.shape[1:] == shape[1:])
    if not fits or any(part.shape[1:] != shape[1:] for part in parts):
        raise ValueError(
            f"{', '.join(place.sources)} have shapes {[tuple(p.shape) for p in parts]}, "
            f"vLLM's parameter is {tuple(current.shape)}"
        )
    return _Write(place, tuple(parts), shape)


def _part(base: torch.Tensor | None, sent: tuple[torch.Tensor, ...], share: Share, device: torch.device) -> _Part:
    """The worker's share; what was sent stays a view of where the trainer's next tensors will stand."""
    rows, columns = share
    if base is None:
        [weight] = sent
        return _Part(None, (weight[rows] if weight.dim() == 1 else weight[share],))
    if share != WHOLE:
        base = base[rows].clone() if base.dim() == 1 else base[share].clone()  # a view would keep the rest in memory
    if not sent:
        return _Part(base.to(device), ())
    a, b = sent
    return _Part(base.to(device), (a[:, columns], b[rows]))


def _scratch(writes: Sequence[_Write]) -> torch.Tensor | None:
    """fp32 memory for one parameter at a time, small enough to stay in the caches; None: each gets its own.

    vLLM frees the plain weights that it has packed, so what it was given may be used again; only AMD's plugin keeps
    them. A GPU's allocator makes new memory as fast as old.
    """
    if any(getattr(w.place.module, w.place.parameter).device.type != "cpu" for w in writes):
        return None
    if any(hasattr(w.place.module, "cpu_linear") for w in writes):
        from vllm.platforms import current_platform

        if current_platform.is_zen_cpu():
            return None
    return torch.empty(max(math.prod(write.shape) for write in writes))


def _fill(rows: torch.Tensor, part: _Part, scale: float) -> None:
    if part.base is None:
        rows.copy_(part.sent[0])
    elif part.sent:
        a, b = part.sent
        torch.addmm(part.base.to(rows), b.to(rows), a.to(rows), alpha=scale, out=rows)
    else:
        rows.copy_(part.base)


def _put(place: Place, value: torch.Tensor) -> None:
    module, current = place.module, getattr(place.module, place.parameter)
    if current.numel() == 0:  # the CPU build keeps its packed copy alone
        setattr(module, place.parameter, nn.Parameter(value.to(current.dtype), requires_grad=False))
        _pack(module, keep=False)
        return
    current[: value.shape[0]].copy_(value)  # the storage stays, so CUDA graphs stay valid
    for holder in (module, *place.tied):
        if place.parameter == "weight" and hasattr(holder, "cpu_linear"):
            _pack(holder, keep=True)  # an output head computes from a packed copy beside its plain weight


def _pack(module: nn.Module, *, keep: bool) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(module, remove_weight=not keep)


def _untied(place: Place) -> Place:
    """Give a head that has factors a weight of its own, so that the embedding stays as it was."""
    weight = getattr(place.module, place.parameter)
    setattr(place.module, place.parameter, nn.Parameter(weight.detach().clone(), requires_grad=False))
    return replace(place, tied=())


def _read_originals(folder: Path, places: Sequence[Place], whole: Set[str]) -> dict[str, torch.Tensor]:
    """The original tensors of the places but those in `whole`; fp32 on a CPU, else as the files have them."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            where = dict.fromkeys(file.keys(), "model.safetensors")
    embeddings = [name for name in where if name.endswith("embed_tokens.weight")]
    stored: dict[str, str] = {}
    fp32: set[str] = set()
    for place in places:
        for name in set(place.sources) - whole:
            # The head of a model with tied embeddings is stored under the embedding's name only.
            stored[name] = embeddings[0] if name == "lm_head.weight" and name not in where and embeddings else name
            if getattr(place.module, place.parameter).device.type == "cpu":
                fp32.add(name)
    missing = sorted(set(stored.values()) - where.keys())
    if missing:
        raise LookupError(f"{folder} has no tensor {', '.join(missing)}")
    weights: dict[str, torch.Tensor] = {}
    for file_name in sorted({where[name] for name in stored.values()}):
        with safe_open(folder / file_name, framework="pt") as file:
            weights |= {n: file.get_tensor(s) for n, s in stored.items() if where[s] == file_name}
    return {name: weight.float() if name in fp32 else weight for name, weight in weights.items()}
