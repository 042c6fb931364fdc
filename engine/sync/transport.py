"""How the trainer's tensors reach the samplers: one flat buffer, LoRA factors and whole weights alike.

`engine.sync.ways` opens either side. Each trainer's side has `address`, `write`, `meet`,
`send` and `close`, each reader's `tensors`, `scale` and `fetch`. Here is shared memory, in `collective` are gloo and
NCCL. The memory is a file without a name, so nothing is left of it however the trainer ends; readers open it through
the trainer's /proc entry, grandchildren too.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Tensors = Mapping[str, tuple[torch.Tensor, ...]]
"""A pair is LoRA's A `[rank, in]` and B `[out, rank]` of the layer that the name spells; one tensor alone is the new
value of the parameter that the name spells. Names are those of transformers."""
Dtype = Literal["float32", "bfloat16"]
Shapes = Mapping[str, tuple[torch.Size, ...]]
Places = Mapping[str, tuple[tuple[int, tuple[int, ...]], ...]]
"""Of each name's tensors: where it begins in the buffer, counted in numbers, and its shape."""
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class SharedTensors:
    """The trainer's side: the buffer and where each tensor stands in it."""

    def __init__(self, shapes: Shapes, scale: float = 1.0, dtype: Dtype = "float32") -> None:
        """`shapes`: of each name's tensors; `scale`: what B A is multiplied by; `dtype`: of the whole buffer."""
        self._places, numbers = lay_out(shapes)
        self._scale, self._dtype = scale, dtype
        self._fd = os.memfd_create("rlvr-weights")
        os.ftruncate(self._fd, DTYPES[dtype].itemsize * numbers)
        flat = _map(self._fd, dtype)
        self._views = views_of(flat, self._places)
        self.bytes: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
        """The whole buffer as it lies in memory."""

    @property
    def address(self) -> dict[str, Any]:
        """What a reader needs to find the tensors; plain data."""
        return {
            "transport": "shared_memory",
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "places": self._places,
            "scale": self._scale,
            "dtype": self._dtype,
        }

    def write(self, tensors: Tensors) -> None:
        """Copy the tensors in. Raises KeyError or ValueError where names or shapes are not the ones agreed on."""
        copy_in(self._views, tensors)

    def meet(self, members: Mapping[int, int]) -> list[dict[str, Any] | None]:
        """What each member must be told to `fetch` next: nothing, for it looks at the memory itself."""
        return [None] * len(members)

    def send(self, version: int, gone: Callable[[], Collection[int]] = tuple) -> None:
        """Does nothing: what was written is there already."""

    def close(self) -> None:
        """Give the memory back once the readers have closed it too."""
        if self._fd >= 0:
            self._views.clear()
            del self.bytes
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
        self.tensors: Tensors = views_of(self._shared if self._copy is None else self._copy, address["places"])

    def fetch(self, meeting: Mapping[str, Any] | None = None, worker: int = 0) -> None:
        """Bring what the trainer wrote to the device: one copy of the whole buffer, none on a CPU."""
        if self._copy is not None:
            self._copy.copy_(self._shared)


def _map(fd: int, dtype: Dtype) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=DTYPES[dtype])


def lay_out(shapes: Shapes) -> tuple[Places, int]:
    """Places in a flat buffer, and how many numbers it holds."""
    places: dict[str, tuple[tuple[int, tuple[int, ...]], ...]] = {}
    numbers = 0
    for name, group in shapes.items():
        if len(group) not in (1, 2):
            raise ValueError(f"{name} has {len(group)} tensors: a layer has two factors, a weight is one tensor")
        placed = []
        for shape in group:
            placed.append((numbers, tuple(shape)))
            numbers += shape.numel()
        places[name] = tuple(placed)
    return places, numbers


def views_of(flat: torch.Tensor, places: Places) -> dict[str, tuple[torch.Tensor, ...]]:
    """Each name's tensors as they stand in the buffer."""
    return {
        name: tuple(flat[at : at + torch.Size(shape).numel()].view(tuple(shape)) for at, shape in group)
        for name, group in places.items()
    }


@torch.no_grad()
def copy_in(views: Tensors, tensors: Tensors) -> None:
    """Copy tensors over the views. Raises KeyError or ValueError where names or shapes are not the views'."""
    if tensors.keys() != views.keys():
        raise KeyError(f"tensors that were not announced or are missing: {tensors.keys() ^ views.keys()}")
    into: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for name, group in tensors.items():
        if [t.shape for t in group] != [v.shape for v in views[name]]:
            raise ValueError(
                f"{name} has shapes {[tuple(t.shape) for t in group]}, "
                f"announced were {[tuple(v.shape) for v in views[name]]}"
            )
        into.extend(views[name])
        values.extend(group)
    torch._foreach_copy_(into, values)
