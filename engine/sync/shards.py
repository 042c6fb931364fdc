"""Which part of a tensor a worker holds where vLLM has split the model over several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

Share = tuple[slice, slice]
"""Rows and columns."""
WHOLE: Share = (slice(None), slice(None))


def share_of(module: nn.Module, parameter: str, source: int, shapes: Sequence[Sequence[int]]) -> Share:
    """What this worker's `module` holds of the tensor number `source` among those that stand in its `parameter`.

    `shapes` are the whole tensors' own. Raises ValueError for a layer that is split in a way not known here.
    """
    size, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    if size == 1:
        return WHOLE
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer: Any = module
    rows, kind = shapes[source][0], type(module)
    if isinstance(module, VocabParallelEmbedding):
        held = layer.shard_indices  # the padding of the last worker's rows aside
        return slice(held.org_vocab_start_index, held.org_vocab_end_index), slice(None)
    if kind is linear.ReplicatedLinear or (kind is linear.RowParallelLinear and parameter == "bias"):
        return WHOLE
    if kind is linear.RowParallelLinear:
        columns = shapes[source][1] // size
        return slice(None), slice(rank * columns, (rank + 1) * columns)
    if kind is linear.QKVParallelLinear and source > 0:
        # A head of keys and values may stand in several workers.
        size, rank = size // layer.num_kv_head_replicas, rank // layer.num_kv_head_replicas
    # A layer with more parts than tensors splits each of its parts, and convolutions have loaders of their own.
    elif not (
        kind is linear.QKVParallelLinear
        or (kind is linear.ColumnParallelLinear and len(shapes[source]) <= 2)
        or (kind is linear.MergedColumnParallelLinear and len(layer.output_sizes) == len(shapes))
    ):
        raise ValueError(
            f"a {kind.__name__} is split over {size} devices in a way that the merged install does not know: "
            f'use sync.install = "adapter", or rollout.tensor_parallel = 1'
        )
    return slice(rank * (rows // size), (rank + 1) * (rows // size)), slice(None)
