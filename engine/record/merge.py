"""W + s B A in the place of W: a base model's safetensors files rewritten block by block, never held as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open

from engine.errors import InputError
from engine.types import Factors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BLOCK_ELEMENTS = 1 << 24
"""Of a tensor that are in memory at a time, a row at least."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
FLOATS = {code: dtype for dtype, code in CODES.items()}
BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
BYTES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
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


@dataclass(frozen=True, slots=True)
class _Write:
    """A tensor to be written: where it comes from, and what is added."""

    name: str
    source: str
    shape: tuple[int, ...]
    code: str
    factors: tuple[torch.Tensor, torch.Tensor] | None


def merge(base: Path, out: Path, factors: Factors, scale: float, *, tied: bool, dtype: str | None) -> Merged:
    """Write the base's weights with `factors`, by the causal model's names, added in fp32, into `out`.

    Each tensor keeps its dtype unless `dtype` is given. A tied head with factors gets a weight of its own. `out` gets
    files of the same names, the index included. Raises InputError where the base's files lack a layer, are no
    safetensors, or hold quantised weights.
    """
    files = _files(base)
    done = Merged()
    with ExitStack() as stack:
        opened = {name: stack.enter_context(safe_open(base / name, "pt")) for name in files}
        where = {key: name for name, file in opened.items() for key in file.keys()}  # noqa: SIM118
        added = {_stored(name, where, base): pair for name, pair in factors.items() if not (tied and name == HEAD)}
        plans = {name: _plan(file, added, dtype) for name, file in opened.items()}
        if tied and HEAD in factors:
            _untie(plans, where, base, factors[HEAD], done)
        for name, plan in plans.items():
            with (out / name).open("wb") as into:
                _header(into, plan)
                for write in plan:
                    _copy(opened[where[write.source]], into, write, scale, done)
    if (base / INDEX).is_file():
        table = json.loads((base / INDEX).read_text())
        table["weight_map"] = {write.name: name for name, plan in plans.items() for write in plan}
        if "total_size" in table.get("metadata", {}):
            table["metadata"]["total_size"] = sum(_bytes(write) for plan in plans.values() for write in plan)
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


def _plan(file: Any, added: Factors, dtype: str | None) -> list[_Write]:
    writes = []
    for name in file.keys():  # noqa: SIM118
        part = file.get_slice(name)
        shape, code = tuple(part.get_shape()), part.get_dtype()
        pair = added.get(name)
        if pair is not None:
            _check(name, shape, code, pair)
        if dtype is not None and code in FLOATS:
            code = CODES[DTYPES[dtype]]
        writes.append(_Write(name, name, shape, code, pair))
    return sorted(writes, key=_place)


def _check(name: str, shape: tuple[int, ...], code: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    want = (pair[1].shape[0], pair[0].shape[1])
    if shape != want:
        raise InputError(f"{name} is {shape} in the base's files, the adapter's layer {want}")
    if code not in FLOATS:
        raise InputError(f"{name} is stored as {code}: a quantised base can't be merged; name the base it was made of")


def _untie(
    plans: dict[str, list[_Write]],
    where: dict[str, str],
    base: Path,
    pair: tuple[torch.Tensor, torch.Tensor],
    done: Merged,
) -> None:
    """Add a head of its own, the embedding plus the factors, to the file that holds the embedding."""
    embedding = _stored("model.embed_tokens", where, base)
    head = f"{'language_model.' if embedding.startswith('language_model.') else ''}{HEAD}.weight"
    for plan in plans.values():
        plan[:] = [write for write in plan if write.name != head]  # a copy of the embedding that some files have
    plan = plans[where[embedding]]
    source = next(write for write in plan if write.name == embedding)
    _check(head, source.shape, source.code, pair)
    plan.append(_Write(head, embedding, source.shape, source.code, pair))
    plan.sort(key=_place)
    done.untied = True


def _place(write: _Write) -> tuple[int, str]:
    """Wide types first, so that every tensor is aligned."""
    return -_width(write.code), write.name


def _width(code: str) -> int:
    """Bytes of an element."""
    if code not in BYTES:
        raise InputError(f"the base's files hold tensors stored as {code}, which can't be copied here")
    return BYTES[code]


def _bytes(write: _Write) -> int:
    return _width(write.code) * torch.Size(write.shape).numel()


def _header(into: IO[bytes], plan: list[_Write]) -> None:
    """A safetensors file's beginning: its length, then JSON with each tensor's dtype, shape and place."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for write in plan:
        start, end = end, end + _bytes(write)
        table[write.name] = {"dtype": write.code, "shape": list(write.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    into.write(len(text).to_bytes(8, "little") + text)


def _copy(file: Any, into: IO[bytes], write: _Write, scale: float, done: Merged) -> None:
    target = FLOATS.get(write.code)
    if write.factors is not None:
        done.layers += 1
        done.weights += torch.Size(write.shape).numel()
        done.dtypes.add(str(target).removeprefix("torch."))
    for start, block in _blocks(file, write):
        cast = block if target is None else block.to(target)
        if write.factors is not None:
            a, b = write.factors
            delta = scale * (b[start : start + len(block)] @ a)
            before, cast = cast, (block.float() + delta).to(cast.dtype)
            done.unmoved += int(((cast == before) & (delta != 0)).sum())
        into.write(cast.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _blocks(file: Any, write: _Write) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor's rows in blocks, each with its first row's number."""
    if len(write.shape) < 2:
        yield 0, file.get_tensor(write.source)
        return
    part = file.get_slice(write.source)
    rows = max(1, BLOCK_ELEMENTS // max(1, torch.Size(write.shape[1:]).numel()))
    for start in range(0, write.shape[0], rows):
        yield start, part[start : start + rows]
