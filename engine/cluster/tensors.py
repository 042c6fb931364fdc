"""The trainer's tensors through Ray's object store: put there once a version, fetched once by each node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray

from engine.sync import SharedTensors
from engine.sync.transport import Dtype, Shapes, Tensors

CLUSTER = "cluster"
"""The transport's name in an address."""


class ClusterTensors:
    """The trainer's side. The other is an actor of `engine.cluster.sampler_actor`."""

    def __init__(self, shapes: Shapes, scale: float = 1.0, dtype: Dtype = "float32") -> None:
        """As of `SharedTensors`."""
        self._shapes, self._scale, self._dtype = dict(shapes), scale, dtype
        self._buffer = SharedTensors(shapes, scale, dtype)
        self._stored: Any = None
        """Ray's reference to what was written last; while it is held, the object store keeps it."""

    @property
    def address(self) -> dict[str, Any]:
        """What an actor needs to make room; plain data."""
        return {"transport": CLUSTER, "shapes": self._shapes, "scale": self._scale, "dtype": self._dtype}

    def write(self, tensors: Tensors) -> None:
        """Put the tensors into the store. Raises KeyError or ValueError where names or shapes are not those agreed."""
        self._buffer.write(tensors)
        self._stored = ray.put(self._buffer.bytes)

    def meet(self, members: Mapping[int, int]) -> list[dict[str, Any] | None]:
        """What each member must be told: where in the store they are."""
        return [{"stored": self._stored} for _ in members]

    def send(self, version: int, gone: Callable[[], Collection[int]] = tuple) -> None:
        """Does nothing: nodes fetch what they have not."""

    def close(self) -> None:
        """Give the memory back."""
        self._stored = None
        self._buffer.close()
