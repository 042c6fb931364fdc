"""LoRA factors in shared memory: one flat fp32 buffer in an anonymous file.

The file has no name, so nothing is left of it however the trainer ends; readers open it through the trainer's
/proc entry, grandchildren too.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch

from engine.types import Factors


class SharedFactors:
    """The trainer's side: the buffer and where each factor stands in it."""

    def __init__(self, shapes: Mapping[str, tuple[torch.Size, torch.Size]], scale: float) -> None:
        """`shapes`: (shape of A, shape of B) by module name; `scale`: what B A is multiplied by."""
        self._places: dict[str, tuple[int, tuple[int, ...], int, tuple[int, ...]]] = {}
        offset = 0
        for name, (a, b) in shapes.items():
            self._places[name] = (offset, tuple(a), offset + a.numel(), tuple(b))
            offset += a.numel() + b.numel()
        self._scale = scale
        self._fd = os.memfd_create("rlvr-factors")
        os.ftruncate(self._fd, 4 * offset)
        self._views = _map(self._fd, self._places)

    @property
    def address(self) -> dict[str, Any]:
        """What a reader needs to find the factors; plain data."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "places": self._places, "scale": self._scale}

    @torch.no_grad()
    def write(self, factors: Factors) -> None:
        """Copy the factors in. Raises KeyError or RuntimeError where names or shapes are not the ones agreed on."""
        if factors.keys() != self._views.keys():
            raise KeyError(f"factors that were not announced or are missing: {factors.keys() ^ self._views.keys()}")
        for name, (a, b) in factors.items():
            self._views[name][0].copy_(a)
            self._views[name][1].copy_(b)

    def close(self) -> None:
        """Give the memory back once the readers have closed it too."""
        if self._fd >= 0:
            self._views.clear()
            os.close(self._fd)
            self._fd = -1


def attach(address: Mapping[str, Any]) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], float]:
    """The reader's side: views on the trainer's factors (not copies) by module name, and their scale."""
    fd = os.open(address["path"], os.O_RDWR)
    try:
        return _map(fd, address["places"]), address["scale"]
    finally:
        os.close(fd)


def _map(fd: int, places: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    flat = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.float32)
    return {
        name: (
            flat[at_a : at_a + a[0] * a[1]].view(tuple(a)),
            flat[at_b : at_b + b[0] * b[1]].view(tuple(b)),
        )
        for name, (at_a, a, at_b, b) in places.items()
    }
