"""The ways of writing the trainer's tensors into a loaded vLLM model, in place, behind one small interface."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from engine.sync.adapter import AdapterInstall
from engine.sync.merged import MergedInstall
from engine.sync.transport import Tensors

How = Literal["merged", "adapter"]


class Install(Protocol):
    """Bound once to the trainer's tensors, then written as often as they change."""

    def write(self) -> None:
        """Take over what stands in the tensors now."""


def bind_install(how: How, model_runner: Any, model_dir: str, sent: Tensors, scale: float) -> Install:
    """Find every tensor's place in the model of vLLM's `model_runner`.

    `merged` writes W0 + scale B A, or whole weights, over the model's own; `adapter` writes the factors into vLLM's
    LoRA slot, which the engine must have been started with. Raises LookupError with the names that have no place.
    """
    if how == "merged":
        return MergedInstall(model_runner.get_model(), model_dir, sent, scale)
    manager = getattr(model_runner, "lora_manager", None)
    if manager is None:
        raise ValueError('the adapter install needs a sampler that was started with install = "adapter" and a rank')
    return AdapterInstall(manager, sent, scale)
