"""Trainer to vLLM, in place: LoRA factors through shared memory, written by vLLM's own worker, proved by a canary."""

from engine.sync.canary import Canary, CanaryError
from engine.sync.transport import SharedFactors

__all__ = ["Canary", "CanaryError", "SharedFactors"]
