"""W + s B A in the place of W: a base model's safetensors files rewritten, one of them in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.errors import InputError
from engine.types import Factors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BLOCK_ELEMENTS = 1 << 24
"""Of a layer that are summed in fp32 at a time, a row at least."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD = "lm_head"
NESTINGS = (
    ("model.", "model."),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head", "lm_head"),
    ("lm_head", "language_model.lm_head"),
)
"""How a layer's name in the causal model begins, and how it may begin in the files of a wrapper around it."""


@dataclass(slots=True)
class Merged:
    """What a merge did."""

    layers: int = 0
    weights: int = 0
    """Of those layers."""
    unmoved: int = 0
    """Of them, those that a change other than zero left as they were when the sum was cast."""
    untied: bool = False
    dtypes: set[str] = field(default_factory=set)
    """Of the merged layers, as written."""


def merge(base: Path, out: Path, factors: Factors, scale: float, *, tied: bool, dtype: str | None) -> Merged:
    """Write the base's weights with `factors`, by the causal model's names, added in fp32, into `out`.

    Each tensor keeps its dtype unless `dtype` is given. A tied head with factors gets a weight of its own. `out` gets
    files of the same names, the index included. Raises InputError where the base's files lack a layer, are no
    safetensors, or hold quantised weights.
    """
    names = _files(base)
    done = Merged(untied=tied and HEAD in factors)
    where: dict[str, str] = {}
    size = 0
    with ExitStack() as stack:
        opened = {name: stack.enter_context(safe_open(base / name, "pt")) for name in names}
        stored = {key: name for name, file in opened.items() for key in file.keys()}  # noqa: SIM118
        added = {_stored(name, stored, base): pair for name, pair in factors.items() if not (tied and name == HEAD)}
        embedding = _stored("model.embed_tokens", stored, base) if done.untied else ""
        head = f"{'language_model.' if embedding.startswith('language_model.') else ''}{HEAD}.weight"
        for name, file in opened.items():
            tensors = {}
            for key in file.keys():  # noqa: SIM118
                if done.untied and key == head:
                    continue  # a copy of the embedding that some files have
                tensor = file.get_tensor(key)
                if done.untied and key == embedding:
                    tensors[head] = _sum(head, tensor, factors[HEAD], scale, dtype, done)
                if key in added:
                    tensors[key] = _sum(key, tensor, added[key], scale, dtype, done)
                else:
                    tensors[key] = tensor.to(_written(tensor, dtype))
            save_file(tensors, out / name, metadata={"format": "pt"})
            shutil.copymode(base / "config.json", out / name)  # safetensors gives its files to their owner alone
            where |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
    if (base / INDEX).is_file():
        table = json.loads((base / INDEX).read_text())
        table["weight_map"] = where
        if "total_size" in table.get("metadata", {}):
            table["metadata"]["total_size"] = size
        (out / INDEX).write_text(json.dumps(table, indent=2) + "\n")
    return done


def _files(base: Path) -> list[str]:
    if (base / INDEX).is_file():
        names = sorted(set(json.loads((base / INDEX).read_text())["weight_map"].values()))
    else:
        names = [SINGLE]
    for name in names:
        if not (base / name).is_file():
            raise InputError(f"{base / name}: it is missing; a merge needs the base's safetensors files")
    return names


def _stored(layer: str, where: Mapping[str, str], base: Path) -> str:
    """The name that the layer's weight has in the base's files."""
    for start, instead in NESTINGS:
        if layer.startswith(start) and (name := f"{instead}{layer.removeprefix(start)}.weight") in where:
            return name
    raise InputError(f"{base}: its files have no weight of {layer}")


def _written(tensor: torch.Tensor, dtype: str | None) -> torch.dtype:
    """A tensor's dtype in the merged model: integers and what is quantised stay as they are."""
    return DTYPES[dtype] if dtype is not None and tensor.dtype in DTYPES.values() else tensor.dtype


def _sum(
    name: str,
    weight: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    dtype: str | None,
    done: Merged,
) -> torch.Tensor:
    """W + s B A, summed in fp32 and cast; noted in `done`."""
    a, b = pair
    want = (b.shape[0], a.shape[1])
    if weight.shape != want:
        raise InputError(f"{name} is {tuple(weight.shape)} in the base's files, the adapter's layer {want}")
    if weight.dtype not in DTYPES.values():
        kind = str(weight.dtype).removeprefix("torch.")
        raise InputError(f"{name} is stored as {kind}: a quantised base can't be merged; name the base it was made of")
    summed = weight.to(_written(weight, dtype), copy=True)
    rows = max(1, BLOCK_ELEMENTS // weight.shape[1])
    for block, old, factor in zip(summed.split(rows), weight.split(rows), b.split(rows), strict=True):
        delta = scale * (factor @ a)
        before = block.clone()
        block.copy_(old.float() + delta)
        done.unmoved += int(((block == before) & (delta != 0)).sum())
    done.layers += 1
    done.weights += weight.numel()
    done.dtypes.add(str(summed.dtype).removeprefix("torch."))
    return summed
