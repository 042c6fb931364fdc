"""Which transport: opened at the trainer by its name, at a reader by the address that the trainer gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from engine.sync.collective import CollectiveTensors, Received
from engine.sync.transport import Attached, Dtype, Shapes, SharedTensors

Way = Literal["auto", "shared_memory", "gloo", "nccl"]


def open_transport(
    way: Way, shapes: Shapes, scale: float, dtype: Dtype, device: torch.device | str
) -> SharedTensors | CollectiveTensors:
    """The trainer's side; `auto` is shared memory, since every sampler runs on the trainer's host."""
    if way == "gloo" or way == "nccl":  # in two: mypy narrows no `in`
        return CollectiveTensors(shapes, scale, dtype, backend=way, device=device)
    return SharedTensors(shapes, scale, dtype)


def attach(address: Mapping[str, Any], device: torch.device) -> Attached | Received:
    """A reader's side."""
    return (Attached if address["transport"] == "shared_memory" else Received)(address, device)
