"""Trainer to vLLM, in place: tensors through shared memory, written by vLLM's own worker, proved by a canary."""

from engine.sync.canary import Canary, CanaryError
from engine.sync.transport import SharedTensors

__all__ = ["Canary", "CanaryError", "SharedTensors"]
