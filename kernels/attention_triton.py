"""Segment attention on CUDA in Triton: one program for a block of queries, walking its chain of prefixes.

The layout becomes three small tables: blocks of at most so many tokens, none across a segment's end; for each
segment the flat ranges in front of it; for each segment the flat ranges that have it in front (its
descendants). Forward and dq walk the first kind of range, dk/dv walk the second: no atomics, so results are
deterministic and a sample's output depends on its own chain only, to the bit.

Softmax runs in base 2: p = exp2(s * scale * log2(e) - lse), with lse kept in base 2 (FlashAttention-2's form,
arXiv 2307.08691).
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a Triton kernel are pointers and compile-time values, for which Python has no types)
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import triton_config
from kernels.layout import Layout, merge_ranges


@dataclass(frozen=True, slots=True)
class Tables:
    """A layout on the device, int32: blocks `[n, 2]` (segment, first token), starts `[segments + 1]`, and
    ranges `[m, 2]` (first, last + 1) of segment s at `offsets[s]:offsets[s + 1]`."""

    blocks: torch.Tensor
    starts: torch.Tensor
    prefix_offsets: torch.Tensor
    prefix_ranges: torch.Tensor
    child_offsets: torch.Tensor
    child_ranges: torch.Tensor


@lru_cache(maxsize=16)
def tables(layout: Layout, size: int, device: torch.device) -> Tables:
    """The tables of a layout for blocks of `size` tokens; made once a step, used by every layer."""
    if layout.n_tokens >= 2**31:
        raise ValueError(f"attention impl='triton': {layout.n_tokens} tokens do not fit in int32")
    blocks = [
        (s, first) for s in range(layout.n_segments) for first in range(layout.starts[s], layout.starts[s + 1], size)
    ]
    inside: list[list[tuple[int, int]]] = [[] for _ in range(layout.n_segments)]
    for s in range(layout.n_segments):
        for ancestor in layout.chain(s)[:-1]:
            inside[ancestor].append((layout.starts[s], layout.starts[s + 1]))
    prefix = [layout.prefix_ranges(s) for s in range(layout.n_segments)]
    child = [merge_ranges(ranges) for ranges in inside]

    def table(rows: list[tuple[int, int]]) -> torch.Tensor:
        # Never empty: a null pointer would be one more specialisation to compile.
        return torch.tensor(rows or [(0, 0)], dtype=torch.int32).to(device)

    def offsets(lists: list[tuple[tuple[int, int], ...]]) -> torch.Tensor:
        counts = torch.tensor([0, *(len(ranges) for ranges in lists)])
        return counts.cumsum(0).to(torch.int32).to(device)

    return Tables(
        table(blocks),
        torch.tensor(layout.starts, dtype=torch.int32).to(device),
        offsets(prefix),
        table([r for ranges in prefix for r in ranges]),
        offsets(child),
        table([r for ranges in child for r in ranges]),
    )


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    if IEEE:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _forward_keys(
    acc, peak, total, q, rows, k_ptr, v_ptr, stride_k, stride_v, first, last, factor,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        ok = keys < last
        at = keys.to(tl.int64)
        k = tl.load(k_ptr + at[None, :] * stride_k + dims[:, None], mask=ok[None, :], other=0.0)
        seen = ok[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None])
        s = tl.where(seen, _dot(q, k, IEEE) * factor, float("-inf"))
        new = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(peak - new)
        v = tl.load(v_ptr + at[:, None] * stride_v + dims[None, :], mask=ok[:, None], other=0.0)
        acc = acc * shrink[:, None] + _dot(p.to(v.dtype), v, IEEE)
        total = total * shrink + tl.sum(p, axis=1)
        peak = new
    return acc, peak, total


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    blocks_ptr, starts_ptr, offsets_ptr, ranges_ptr,
    stride_q, stride_k, stride_v, stride_out, stride_head_q, stride_head_k, stride_head_v, stride_head_out,
    tokens, factor, group,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    segment, first = tl.load(blocks_ptr + 2 * block), tl.load(blocks_ptr + 2 * block + 1)
    begin, end = tl.load(starts_ptr + segment), tl.load(starts_ptr + segment + 1)
    rows, dims = first + tl.arange(0, QUERIES), tl.arange(0, DIM)
    ok, at = rows < end, rows.to(tl.int64)
    wide = head.to(tl.int64)
    q = tl.load(q_ptr + wide * stride_head_q + at[:, None] * stride_q + dims[None, :], mask=ok[:, None], other=0.0)
    k_ptr += wide // group * stride_head_k
    v_ptr += wide // group * stride_head_v
    acc = tl.zeros((QUERIES, DIM), dtype=tl.float32)
    # A very low finite start: a block's first keys may all lie in the future of none of its rows, never of
    # all.
    peak = tl.full((QUERIES,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    for r in range(tl.load(offsets_ptr + segment), tl.load(offsets_ptr + segment + 1)):
        low, high = tl.load(ranges_ptr + 2 * r), tl.load(ranges_ptr + 2 * r + 1)
        acc, peak, total = _forward_keys(
            acc, peak, total, q, rows, k_ptr, v_ptr, stride_k, stride_v, low, high, factor, False, KEYS, DIM, IEEE
        )
    acc, peak, total = _forward_keys(
        acc, peak, total, q, rows, k_ptr, v_ptr, stride_k, stride_v, begin, tl.minimum(first + QUERIES, end), factor,
        True, KEYS, DIM, IEEE,
    )  # fmt: skip
    out = acc / total[:, None]
    at_out = out_ptr + wide * stride_head_out + at[:, None] * stride_out + dims[None, :]
    tl.store(at_out, out.to(out_ptr.dtype.element_ty), mask=ok[:, None])
    tl.store(lse_ptr + wide * tokens + at, peak + tl.log2(total), mask=ok)


@triton.jit
def _query_keys(
    acc, q, d_out, lse, delta, rows, k_ptr, v_ptr, stride_k, stride_v, first, last, factor,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        ok = keys < last
        at = keys.to(tl.int64)
        k = tl.load(k_ptr + at[:, None] * stride_k + dims[None, :], mask=ok[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] * stride_v + dims[None, :], mask=ok[:, None], other=0.0)
        seen = ok[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None])
        s = tl.where(seen, _dot(q, tl.trans(k), IEEE) * factor - lse[:, None], float("-inf"))
        ds = tl.exp2(s) * (_dot(d_out, tl.trans(v), IEEE) - delta[:, None])
        acc += _dot(ds.to(k.dtype), k, IEEE)
    return acc


@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, dq_ptr,
    blocks_ptr, starts_ptr, offsets_ptr, ranges_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq,
    stride_head_q, stride_head_k, stride_head_v, stride_head_do, stride_head_dq,
    tokens, factor, scale, group,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    segment, first = tl.load(blocks_ptr + 2 * block), tl.load(blocks_ptr + 2 * block + 1)
    begin, end = tl.load(starts_ptr + segment), tl.load(starts_ptr + segment + 1)
    rows, dims = first + tl.arange(0, QUERIES), tl.arange(0, DIM)
    ok, at, wide = rows < end, rows.to(tl.int64), head.to(tl.int64)
    q = tl.load(q_ptr + wide * stride_head_q + at[:, None] * stride_q + dims[None, :], mask=ok[:, None], other=0.0)
    d_out = tl.load(
        d_out_ptr + wide * stride_head_do + at[:, None] * stride_do + dims[None, :], mask=ok[:, None], other=0.0
    )
    lse = tl.load(lse_ptr + wide * tokens + at, mask=ok, other=0.0)
    delta = tl.load(delta_ptr + wide * tokens + at, mask=ok, other=0.0)
    k_ptr += wide // group * stride_head_k
    v_ptr += wide // group * stride_head_v
    acc = tl.zeros((QUERIES, DIM), dtype=tl.float32)
    for r in range(tl.load(offsets_ptr + segment), tl.load(offsets_ptr + segment + 1)):
        low, high = tl.load(ranges_ptr + 2 * r), tl.load(ranges_ptr + 2 * r + 1)
        acc = _query_keys(
            acc, q, d_out, lse, delta, rows, k_ptr, v_ptr, stride_k, stride_v, low, high, factor,
            False, KEYS, DIM, IEEE,
        )  # fmt: skip
    acc = _query_keys(
        acc, q, d_out, lse, delta, rows, k_ptr, v_ptr, stride_k, stride_v, begin,
        tl.minimum(first + QUERIES, end), factor, True, KEYS, DIM, IEEE,
    )  # fmt: skip
    at_dq = dq_ptr + wide * stride_head_dq + at[:, None] * stride_dq + dims[None, :]
    tl.store(at_dq, (acc * scale).to(dq_ptr.dtype.element_ty), mask=ok[:, None])


@triton.jit
def _key_queries(
    dk, dv, k, v, keys, q_ptr, d_out_ptr, lse_ptr, delta_ptr, stride_q, stride_do, first, last, factor,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM)
    for start in range(first, last, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        ok, at = rows < last, rows.to(tl.int64)
        q = tl.load(q_ptr + at[:, None] * stride_q + dims[None, :], mask=ok[:, None], other=0.0)
        d_out = tl.load(d_out_ptr + at[:, None] * stride_do + dims[None, :], mask=ok[:, None], other=0.0)
        lse = tl.load(lse_ptr + at, mask=ok, other=0.0)
        delta = tl.load(delta_ptr + at, mask=ok, other=0.0)
        seen = ok[None, :]
        if CAUSAL:
            seen = seen & (keys[:, None] <= rows[None, :])
        s = tl.where(seen, _dot(k, tl.trans(q), IEEE) * factor - lse[None, :], float("-inf"))
        p = tl.exp2(s)
        dv += _dot(p.to(d_out.dtype), d_out, IEEE)
        ds = p * (_dot(v, tl.trans(d_out), IEEE) - delta[None, :])
        dk += _dot(ds.to(q.dtype), q, IEEE)
    return dk, dv


@triton.jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    blocks_ptr, starts_ptr, offsets_ptr, ranges_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk,
    stride_head_q, stride_head_k, stride_head_v, stride_head_do, stride_head_dk,
    tokens, factor, scale, group,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys and one key head: its own segment's later queries, then its descendants'."""
    block, head = tl.program_id(0), tl.program_id(1)
    segment, first = tl.load(blocks_ptr + 2 * block), tl.load(blocks_ptr + 2 * block + 1)
    end = tl.load(starts_ptr + segment + 1)
    keys, dims = first + tl.arange(0, KEYS), tl.arange(0, DIM)
    ok, at, wide = keys < end, keys.to(tl.int64), head.to(tl.int64)
    k = tl.load(k_ptr + wide * stride_head_k + at[:, None] * stride_k + dims[None, :], mask=ok[:, None], other=0.0)
    v = tl.load(v_ptr + wide * stride_head_v + at[:, None] * stride_v + dims[None, :], mask=ok[:, None], other=0.0)
    dk = tl.zeros((KEYS, DIM), dtype=tl.float32)
    dv = tl.zeros((KEYS, DIM), dtype=tl.float32)
    for g in range(0, group):
        query_head = wide * group + g
        q_head, do_head = q_ptr + query_head * stride_head_q, d_out_ptr + query_head * stride_head_do
        lse_head, delta_head = lse_ptr + query_head * tokens, delta_ptr + query_head * tokens
        dk, dv = _key_queries(
            dk, dv, k, v, keys, q_head, do_head, lse_head, delta_head, stride_q, stride_do, first, end, factor,
            True, QUERIES, DIM, IEEE,
        )  # fmt: skip
        for r in range(tl.load(offsets_ptr + segment), tl.load(offsets_ptr + segment + 1)):
            low, high = tl.load(ranges_ptr + 2 * r), tl.load(ranges_ptr + 2 * r + 1)
            dk, dv = _key_queries(
                dk, dv, k, v, keys, q_head, do_head, lse_head, delta_head, stride_q, stride_do, low, high, factor,
                False, QUERIES, DIM, IEEE,
            )  # fmt: skip
    at_dk = wide * stride_head_dk + at[:, None] * stride_dk + dims[None, :]
    tl.store(dk_ptr + at_dk, (dk * scale).to(dk_ptr.dtype.element_ty), mask=ok[:, None])
    tl.store(dv_ptr + at_dk, dv.to(dv_ptr.dtype.element_ty), mask=ok[:, None])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """`segment_attention` for CUDA tensors (and for CPU tensors in Triton's interpreter)."""
    out: torch.Tensor = _SegmentAttention.apply(q, k, v, layout, scale)
    return out


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous head_dim; the kernels take any token and head stride that keeps 16-byte rows."""
    unit = 16 // x.element_size()
    even = x.stride(2) == 1 and x.stride(0) % unit == 0 and x.stride(1) % unit == 0 and x.data_ptr() % 16 == 0
    return x if even else x.contiguous()


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
    ) -> torch.Tensor:
        q, k, v = _dense(q), _dense(k), _dense(v)
        tokens, heads, dim = q.shape
        size = triton_config.attention_forward(q.dtype, dim)
        t = tables(layout, size.rows, q.device)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        _forward[(len(t.blocks), heads)](
            q, k, v, out, lse, t.blocks, t.starts, t.prefix_offsets, t.prefix_ranges,
            q.stride(0), k.stride(0), v.stride(0), out.stride(0), q.stride(1), k.stride(1), v.stride(1), out.stride(1),
            tokens, scale * math.log2(math.e), heads // k.shape[1],
            QUERIES=size.rows, KEYS=size.columns, DIM=dim, IEEE=q.dtype == torch.float32,
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = _dense(upstream[0])
        tokens, heads, dim = q.shape
        size = triton_config.attention_backward(q.dtype, dim)
        delta = (out.float() * d_out.float()).sum(dim=2).T.contiguous()
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        factor, group = ctx.scale * math.log2(math.e), heads // k.shape[1]
        same = (
            q.stride(0), k.stride(0), v.stride(0), d_out.stride(0),
        )  # fmt: skip
        head = (q.stride(1), k.stride(1), v.stride(1), d_out.stride(1))
        options = {"DIM": dim, "IEEE": q.dtype == torch.float32, "num_warps": size.warps, "num_stages": size.stages}
        t = tables(ctx.layout, size.rows, q.device)
        _backward_queries[(len(t.blocks), heads)](
            q, k, v, d_out, lse, delta, dq, t.blocks, t.starts, t.prefix_offsets, t.prefix_ranges,
            *same, dq.stride(0), *head, dq.stride(1), tokens, factor, ctx.scale, group,
            QUERIES=size.rows, KEYS=size.columns, **options,
        )  # fmt: skip
        t = tables(ctx.layout, size.columns, q.device)
        _backward_keys[(len(t.blocks), k.shape[1])](
            q, k, v, d_out, lse, delta, dk, dv, t.blocks, t.starts, t.child_offsets, t.child_ranges,
            *same, dk.stride(0), *head, dk.stride(1), tokens, factor, ctx.scale, group,
            QUERIES=size.rows, KEYS=size.columns, **options,
        )  # fmt: skip
        return dq, dk, dv, None, None
