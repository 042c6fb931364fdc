"""LoRA factors into the slot that vLLM's own LoRA layers compute from, in place: no file and no new adapter id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.sync.places import renaming
from engine.sync.transport import Tensors

NOWHERE = "rlvr.nowhere"
ADAPTER_ID = 1
"""Of the one adapter that there is; every request carries it."""


class AdapterInstall:
    """Writes A and scale B of `sent`, as they stand at each `write`, into vLLM's slot of the adapter.

    `worker_manager` is the worker's LoRA manager of an engine that was started with `enable_lora`. vLLM expects the
    scale in B. Raises LookupError with the names of the factors that have no place, and ValueError for a rank above
    the slot's or a layer that vLLM can't slice in place.
    """

    def __init__(self, worker_manager: Any, sent: Tensors, scale: float) -> None:
        self._scale = scale
        whole = [name for name, group in sent.items() if len(group) != 2]
        if whole:
            raise ValueError(f"the adapter install takes factors, these are whole weights: {', '.join(whole)}")
        manager = worker_manager._adapter_manager
        slot = activate(worker_manager)
        rename = renaming(manager.model)
        factors = {rename(name): group for name, group in sent.items()}
        unplaced = dict(zip(factors, sent, strict=True))
        self._into_a: list[torch.Tensor] = []
        self._into_b: list[torch.Tensor] = []
        self._from_a: list[torch.Tensor] = []
        self._from_b: list[torch.Tensor] = []
        for name, layer in manager.modules.items():
            layer.reset_lora(slot)  # nothing may be left of an adapter that was bound before
            parts = manager.packed_modules.get(name, [name])
            pairs = [factors.get(part) for part in parts]
            if any(pairs):
                self._bind(name, layer, slot, pairs)
                for part in parts:
                    unplaced.pop(part, None)
        if unplaced:
            raise LookupError(f"factors without a place among vLLM's LoRA layers: {', '.join(unplaced.values())}")

    @torch.no_grad()
    def write(self) -> None:
        """Install what stands in the sent factors now."""
        torch._foreach_copy_(self._into_a, self._from_a)
        for into, b in zip(self._into_b, self._from_b, strict=True):
            torch.mul(b, self._scale, out=into)

    def _bind(self, name: str, layer: Any, slot: int, pairs: Sequence[tuple[torch.Tensor, ...] | None]) -> None:
        a, b = _sliced(layer, [p[0] if p else None for p in pairs], [p[1] if p else None for p in pairs])
        for into_a, into_b, from_a, from_b in zip(
            _stacked(layer.lora_a_stacked), _stacked(layer.lora_b_stacked), a, b, strict=True
        ):
            if from_a is None or from_b is None:
                continue  # an untrained part of a fused layer keeps the zeros of an empty slot
            for what, view, source in (("A", into_a[slot, 0], from_a), ("B", into_b[slot, 0], from_b)):
                if any(have < need for have, need in zip(view.shape, source.shape, strict=True)):
                    raise ValueError(
                        f"{name}: its factor {what} is {tuple(source.shape)}, vLLM's slot {tuple(view.shape)}; start "
                        f"the sampler with at least the adapter's rank"
                    )
                if not any(
                    source.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for p in pairs if p for t in p
                ):
                    raise ValueError(
                        f"{name}: vLLM copies this layer's factor {what} to slice it, so it can't be bound"
                    )
            rank = from_a.shape[0]
            self._into_a.append(into_a[slot, 0, :rank, : from_a.shape[1]])
            self._into_b.append(into_b[slot, 0, : from_b.shape[0], :rank])
            self._from_a.append(from_a)
            self._from_b.append(from_b)


def activate(worker_manager: Any) -> int:
    """The slot of our adapter, which is made empty, without a file, where vLLM does not know it yet.

    Every request names the adapter, and vLLM would look for a folder at the first one that it does not know.
    """
    manager = worker_manager._adapter_manager
    if ADAPTER_ID not in manager.lora_index_to_id:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        # vLLM takes no adapter without any layer, so it gets one that no module has; every slot stays zero.
        nowhere = LoRALayerWeights(NOWHERE, 1, 1, torch.zeros(1, 1), torch.zeros(1, 1), scaling=1.0)
        manager.add_adapter(LoRAModel(ADAPTER_ID, manager.lora_config.max_lora_rank, {NOWHERE: nowhere}))
        manager.activate_adapter(ADAPTER_ID)
    return int(manager.lora_index_to_id.index(ADAPTER_ID))


Slices = list[torch.Tensor | None]


def _sliced(layer: Any, a: Slices, b: Slices) -> tuple[Slices, Slices]:
    """The factors of a layer cut as its slots are: a part over several slots, and each over tensor-parallel ranks."""
    if getattr(layer, "n_slices", 1) == 1:
        if getattr(layer, "tp_size", 1) > 1 and hasattr(layer, "slice_lora_a"):
            return [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]
        return a, b
    if len(b) != layer.n_slices:  # Gated DeltaNet: in_proj_qkv fills three slots of in_proj_qkvz
        a, b = layer.expand_packed_lora(a, b)
    if layer.tp_size > 1:
        a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    return a, b


def _stacked(tensors: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The output head has one slot tensor where the other layers have a tuple of them."""
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors
