"""Tensors in shared memory: one flat buffer in an anonymous file, LoRA factors and whole weights alike.

The file has no name, so nothing is left of it however the trainer ends; readers open it through the trainer's
/proc entry, grandchildren too.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch

Tensors = Mapping[str, tuple[torch.Tensor, ...]]
"""A pair is LoRA's A `[rank, in]` and B `[out, rank]` of the layer that the name spells; one tensor alone is the new
value of the parameter that the name spells. Names are those of transformers."""
Dtype = Literal["float32", "bfloat16"]
_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class SharedTensors:
    """The trainer's side: the buffer and where each tensor stands in it."""

    def __init__(
        self, shapes: Mapping[str, tuple[torch.Size, ...]], scale: float = 1.0, dtype: Dtype = "float32"
    ) -> None:
        """`shapes`: of each name's tensors; `scale`: what B A is multiplied by; `dtype`: of the whole buffer."""
        self._places: dict[str, tuple[tuple[int, tuple[int, ...]], ...]] = {}
        offset = 0
        for name, group in shapes.items():
            if len(group) not in (1, 2):
                raise ValueError(f"{name} has {len(group)} tensors: a layer has two factors, a weight is one tensor")
            placed = []
            for shape in group:
                placed.append((offset, tuple(shape)))
                offset += shape.numel()
            self._places[name] = tuple(placed)
        self._scale, self._dtype = scale, dtype
        self._fd = os.memfd_create("rlvr-weights")
        os.ftruncate(self._fd, _DTYPES[dtype].itemsize * offset)
        self._views = _views(_map(self._fd, dtype), self._places)

    @property
    def address(self) -> dict[str, Any]:
        """What a reader needs to find the tensors; plain data."""
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "places": self._places,
            "scale": self._scale,
            "dtype": self._dtype,
        }

    @torch.no_grad()
    def write(self, tensors: Tensors) -> None:
        """Copy the tensors in. Raises KeyError or ValueError where names or shapes are not the ones agreed on."""
        if tensors.keys() != self._views.keys():
            raise KeyError(f"tensors that were not announced or are missing: {tensors.keys() ^ self._views.keys()}")
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for name, group in tensors.items():
            views = self._views[name]
            if [t.shape for t in group] != [v.shape for v in views]:
                raise ValueError(
                    f"{name} has shapes {[tuple(t.shape) for t in group]}, "
                    f"announced were {[tuple(v.shape) for v in views]}"
                )
            into.extend(views)
            values.extend(group)
        torch._foreach_copy_(into, values)

    def close(self) -> None:
        """Give the memory back once the readers have closed it too."""
        if self._fd >= 0:
            self._views.clear()
            os.close(self._fd)
            self._fd = -1


class Attached:
    """The reader's side: the trainer's tensors on the reader's device."""

    def __init__(self, address: Mapping[str, Any], device: torch.device) -> None:
        """Map the memory. On a CPU the tensors are views of it, elsewhere of a copy that `fetch` renews."""
        fd = os.open(address["path"], os.O_RDWR)
        try:
            self._shared = _map(fd, address["dtype"])
        finally:
            os.close(fd)
        self._copy = None if device.type == "cpu" else torch.empty_like(self._shared, device=device)
        self.scale: float = address["scale"]
        self.tensors: Tensors = _views(self._shared if self._copy is None else self._copy, address["places"])

    def fetch(self) -> None:
        """Bring what the trainer wrote to the device: one copy of the whole buffer, none on a CPU."""
        if self._copy is not None:
            self._copy.copy_(self._shared)


def _map(fd: int, dtype: Dtype) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=_DTYPES[dtype])


def _views(flat: torch.Tensor, places: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, ...]]:
    return {
        name: tuple(flat[at : at + torch.Size(shape).numel()].view(tuple(shape)) for at, shape in group)
        for name, group in places.items()
    }
