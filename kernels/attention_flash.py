"""Segment attention on CUDA with PyTorch's own FlashAttention-2: one pass a level of the tree, merged by
logsumexp.

Pass 0 is every segment against itself, causally. For each segment that has descendants, all of their queries
also read all of its keys; these (queries, keys) pairs are grouped into passes of pairwise different queries,
each one varlen call. With out_p and lse_p of pass p the exact result over the union of keys is

    lse = logsumexp_p(lse_p)        out = sum_p exp(lse_p - lse) * out_p

In the backward each pass is given the merged out and lse: its probabilities are then exp(s - lse), the right
ones, and dS = P * (dP - rowsum(dOut * out)) is linear in the keys, so the passes' gradients add up to the
exact gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernels.layout import Layout

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Pass:
    """One varlen call: query rows and key rows (None: all tokens in order), int32 offsets, longest lengths."""

    query_rows: torch.Tensor | None
    key_rows: torch.Tensor | None
    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    longest_query: int
    longest_key: int
    causal: bool


@lru_cache(maxsize=8)
def passes(layout: Layout, device: torch.device) -> tuple[Pass, ...]:
    """The varlen calls of a layout; made once a step, used by every layer."""
    own = [(layout.starts[s], layout.starts[s + 1]) for s in range(layout.n_segments) if layout.lengths[s]]
    offsets = torch.tensor([0, *(stop for _, stop in own)], dtype=torch.int32).to(device)
    longest = max((stop - start for start, stop in own), default=0)
    made = [Pass(None, None, offsets, offsets, longest, longest, True)]
    levels: dict[int, list[tuple[Ranges, tuple[int, int]]]] = {}
    for ancestor in range(layout.n_segments):
        inside = [s for s in range(layout.n_segments) if ancestor in layout.chain(s)[:-1] and layout.lengths[s]]
        if inside and layout.lengths[ancestor]:
            keys = (layout.starts[ancestor], layout.starts[ancestor + 1])
            queries = [(layout.starts[s], layout.starts[s + 1]) for s in inside]
            # Ancestors at one depth have different descendants: one call serves them all.
            levels.setdefault(len(layout.chain(ancestor)), []).append((queries, keys))
    return (*made, *(_pass(pairs, device) for _, pairs in sorted(levels.items())))


def _pass(pairs: list[tuple[Ranges, tuple[int, int]]], device: torch.device) -> Pass:
    def rows(ranges: Ranges) -> torch.Tensor:
        return torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)

    query_lengths = [sum(stop - start for start, stop in queries) for queries, _ in pairs]
    key_lengths = [stop - start for _, (start, stop) in pairs]
    return Pass(
        rows([r for queries, _ in pairs for r in queries]),
        rows([keys for _, keys in pairs]),
        offsets(query_lengths),
        offsets(key_lengths),
        max(query_lengths),
        max(key_lengths),
        False,
    )


def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Pass, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch's varlen FlashAttention: `(out [queries, heads, head_dim], lse [heads, queries] fp32, two of RNG)`."""
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, p.query_offsets, p.key_offsets, p.longest_query, p.longest_key, 0.0, p.causal, False, scale=scale
    )
    return out, lse, seed, offset


def varlen_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    p: Pass,
    random: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of one pass from the merged out and lse."""
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse, p.query_offsets, p.key_offsets, p.longest_query, p.longest_key,
        0.0, p.causal, *random, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """`segment_attention` for CUDA tensors in bf16 or fp16."""
    out: torch.Tensor = _SegmentAttention.apply(q, k, v, layout, scale)
    return out


def _take(x: torch.Tensor, rows: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    return x if rows is None else x.index_select(dim, rows)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        first, *rest = passes(layout, q.device)
        part, lse, seed, offset = varlen_forward(q, k, v, first, scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        out, random = part.to(wide), [seed, offset]
        for p in rest:
            part, part_lse, seed, offset = varlen_forward(
                _take(q, p.query_rows), _take(k, p.key_rows), _take(v, p.key_rows), p, scale
            )
            random += [seed, offset]
            before = _take(lse, p.query_rows, 1)
            merged = torch.logaddexp(before, part_lse)
            kept, added = torch.exp(before - merged).T[..., None], torch.exp(part_lse - merged).T[..., None]
            rows = p.query_rows
            assert rows is not None
            out[rows] = out[rows] * kept + part.to(wide) * added
            lse[:, rows] = merged
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, *random)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *random = ctx.saved_tensors
        d_out = upstream[0].contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        sums = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        for i, p in enumerate(passes(ctx.layout, q.device)):
            grads = varlen_backward(
                _take(d_out, p.query_rows),
                _take(q, p.query_rows),
                _take(k, p.key_rows),
                _take(v, p.key_rows),
                _take(out, p.query_rows),
                _take(lse, p.query_rows, 1).contiguous(),
                p,
                (random[2 * i], random[2 * i + 1]),
                ctx.scale,
            )
            for total, grad, rows in zip(sums, grads, (p.query_rows, p.key_rows, p.key_rows), strict=True):
                if rows is None:
                    total += grad
                else:
                    total.index_add_(0, rows, grad.to(wide))
        dq, dk, dv = (total.to(q.dtype) for total in sums)
        return dq, dk, dv, None, None
