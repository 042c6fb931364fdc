"""Segment attention on a CPU: a loop of PyTorch's fused attention over tiles of segments, never one dense
mask.

Segments that share the same chain of prefixes are taken together, up to `_TILE_QUERIES` queries, with a mask
of only the tile's own size: the fixed cost of a call is paid for a handful of short completions at once, and
the waste (one completion's queries against another's keys) stays below the tile. The whole layer is one
autograd node, so that no slice of a tile costs a zero-filled gradient of the whole token axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernels.dispatch import cpu_compute_dtype
from kernels.layout import Layout, merge_ranges

_TILE_QUERIES = 128  # measured on 64 completions of 4-16 tokens and on 8 of 256: see bench/kernels.py
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Tile:
    """Segments with one chain: the flat ranges of their queries and keys, and what each query may not see."""

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    mask: torch.Tensor | None  # additive [1, 1, queries, keys], or None for one causal segment without prefix


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """`segment_attention` for CPU tensors; multiplies in `cpu_compute_dtype`, accumulates gradients in fp32."""
    out: torch.Tensor = _SegmentAttention.apply(q, k, v, layout, scale)
    return out


@lru_cache(maxsize=4)
def plan(layout: Layout, dtype: torch.dtype) -> tuple[Tile, ...]:
    """The tiles of a layout; made once and used by every layer of the forward and the backward."""
    families: dict[tuple[tuple[int, int], ...], list[list[int]]] = {}
    for s, length in enumerate(layout.lengths):
        if length == 0:
            continue
        tiles = families.setdefault(layout.prefix_ranges(s), [])
        if tiles and sum(layout.lengths[t] for t in tiles[-1]) + length <= _TILE_QUERIES:
            tiles[-1].append(s)
        else:
            tiles.append([s])
    return tuple(_tile(layout, p, segments, dtype) for p, tiles in families.items() for segments in tiles)


def _tile(layout: Layout, prefix: tuple[tuple[int, int], ...], segments: list[int], dtype: torch.dtype) -> Tile:
    own = merge_ranges([(layout.starts[s], layout.starts[s + 1]) for s in segments])
    keys = merge_ranges([*prefix, *own])
    if not prefix and len(segments) == 1:
        return Tile(own, keys, None)
    front = sum(stop - start for start, stop in prefix)
    owner = torch.tensor([i for i, s in enumerate(segments) for _ in range(layout.lengths[s])])
    index = torch.arange(len(owner))
    seen = (owner[:, None] == owner[None, :]) & (index[:, None] >= index[None, :])
    mask = torch.zeros(1, 1, len(owner), front + len(owner), dtype=dtype)
    mask[0, 0, :, front:].masked_fill_(~seen, -torch.inf)
    return Tile(own, keys, mask)


def _take(x: torch.Tensor, ranges: tuple[tuple[int, int], ...], dtype: torch.dtype) -> torch.Tensor:
    parts = [x[start:stop] for start, stop in ranges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)


def _put(x: torch.Tensor, ranges: tuple[tuple[int, int], ...], rows: torch.Tensor, *, add: bool) -> None:
    done = 0
    for start, stop in ranges:
        part = rows[done : done + stop - start]
        done += stop - start
        if add:
            x[start:stop].add_(part)
        else:
            x[start:stop].copy_(part)


def _as_queries(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[n, heads, head_dim]` to `[group, kv_heads, n, head_dim]`: the heads that share a key become the batch."""
    n, heads, head_dim = x.shape
    return x.view(n, kv_heads, heads // kv_heads, head_dim).permute(2, 1, 0, 3)


def _from_queries(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_as_queries`."""
    group, kv_heads, n, head_dim = x.shape
    return x.permute(2, 1, 0, 3).reshape(n, kv_heads * group, head_dim)


def _as_keys(x: torch.Tensor, group: int) -> torch.Tensor:
    """`[n, kv_heads, head_dim]` to `[group, kv_heads, n, head_dim]` without a copy."""
    return x.transpose(0, 1)[None].expand(group, -1, -1, -1)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
    ) -> torch.Tensor:
        dtype, kv_heads = cpu_compute_dtype(q.dtype), k.shape[1]
        out = torch.empty(q.shape, dtype=q.dtype)
        statistics = []
        for tile in plan(layout, dtype):
            part, lse = _forward(
                _as_queries(_take(q, tile.queries, dtype), kv_heads),
                _as_keys(_take(k, tile.keys, dtype), q.shape[1] // kv_heads),
                _as_keys(_take(v, tile.keys, dtype), q.shape[1] // kv_heads),
                0.0,
                tile.mask is None,
                attn_mask=tile.mask,
                scale=scale,
            )
            _put(out, tile.queries, _from_queries(part), add=False)
            statistics.append(lse)
        ctx.save_for_backward(q, k, v, out, *statistics)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, out, *statistics = ctx.saved_tensors
        dtype, kv_heads, group = cpu_compute_dtype(q.dtype), k.shape[1], q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty(q.shape, dtype=q.dtype)
        dk, dv = torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
        for tile, lse in zip(plan(ctx.layout, dtype), statistics, strict=True):
            grads = _backward(
                _as_queries(_take(d_out, tile.queries, dtype), kv_heads),
                _as_queries(_take(q, tile.queries, dtype), kv_heads),
                _as_keys(_take(k, tile.keys, dtype), group),
                _as_keys(_take(v, tile.keys, dtype), group),
                _as_queries(_take(out, tile.queries, dtype), kv_heads),
                lse,
                0.0,
                tile.mask is None,
                attn_mask=tile.mask,
                scale=ctx.scale,
            )
            _put(dq, tile.queries, _from_queries(grads[0]), add=False)
            # A prefix's keys gather gradient from many tiles: the sum is kept in fp32 or wider.
            _put(dk, tile.keys, grads[1].to(wide).sum(0).transpose(0, 1), add=True)
            _put(dv, tile.keys, grads[2].to(wide).sum(0).transpose(0, 1), add=True)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None
