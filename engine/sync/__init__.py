"""Trainer to vLLM, in place: tensors shared or broadcast, written by vLLM's own worker, proved by a canary."""

from engine.sync.canary import Canary, CanaryError
from engine.sync.collective import CollectiveTensors
from engine.sync.transport import SharedTensors
from engine.sync.ways import open_transport

__all__ = ["Canary", "CanaryError", "CollectiveTensors", "SharedTensors", "open_transport"]
