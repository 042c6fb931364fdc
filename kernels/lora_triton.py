"""Grouped LoRA linears on CUDA: the frozen product with the low-rank product in its epilogue, in one kernel.

`y = x W^T + u B^T` reads x and W once and writes y once; as separate products y would be written, read and
written again. The backward's `dx = g W + d_u A` is the same kernel with the other order of the weight. The
skinny products with the factors go to cuBLAS with fp32 results.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a Triton kernel are pointers and compile-time values, for which Python has no types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import triton_config
from kernels.lm_head_triton import _aligned, _pad_rank, _product
from kernels.lora import Factors


@triton.jit
def _linear(
    x_ptr, w_ptr, u_ptr, b_ptr, bias_ptr, before_ptr, out_ptr,
    tokens, outs, width, stride_x, stride_w, stride_u, stride_b, stride_before, stride_out,
    SWAPPED: tl.constexpr, LORA: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """out `[tokens, outs]` = x `[tokens, width]` times w, plus u `[tokens, RANK]` times b, plus bias, plus
    before.

    SWAPPED false: w `[outs, width]` and b `[outs, RANK]` (forward). SWAPPED true: w `[width, outs]` and
    b `[RANK, outs]` (backward). ADD: start from `before`, fp32 `[tokens, outs]`.
    """
    row_tiles = tl.cdiv(tokens, ROWS)
    pid = tl.program_id(0)
    rows = (pid % row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (pid // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    row_ok, column_ok = rows < tokens, columns < outs
    both = row_ok[:, None] & column_ok[None, :]
    wide_rows, wide_columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, width, INNER):
        at = start + inner
        x = tl.load(x_ptr + wide_rows * stride_x + at[None, :], mask=row_ok[:, None] & (at < width)[None, :], other=0.0)
        if SWAPPED:
            w_at = w_ptr + at.to(tl.int64)[:, None] * stride_w + wide_columns
        else:
            w_at = w_ptr + wide_columns * stride_w + at[:, None]
        w = tl.load(w_at, mask=column_ok[None, :] & (at < width)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee") if IEEE else tl.dot(x, w, acc)
    if LORA:
        rank = tl.arange(0, RANK)
        u = tl.load(u_ptr + wide_rows * stride_u + rank[None, :], mask=row_ok[:, None], other=0.0)
        if SWAPPED:
            b_at = b_ptr + rank[:, None] * stride_b + wide_columns
        else:
            b_at = b_ptr + wide_columns * stride_b + rank[:, None]
        b = tl.load(b_at, mask=column_ok[None, :], other=0.0)
        acc = tl.dot(u, b, acc, input_precision="ieee") if IEEE else tl.dot(u, b, acc)
    if BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if ADD:
        acc += tl.load(before_ptr + wide_rows * stride_before + wide_columns, mask=both, other=0.0)
    out_at = out_ptr + wide_rows * stride_out + wide_columns
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=both)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor | None,
    b: torch.Tensor | None,
    out: torch.Tensor,
    *,
    swapped: bool,
    bias: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = x w (+ u b) (+ bias) (+ before); see `_linear` for the shapes."""
    if x.shape[0] == 0:
        return out
    x, w, size = _aligned(x), _aligned(w), triton_config.linear(x.dtype)
    low, up = (x, w) if u is None or b is None else (u, b)
    start = out if before is None else before
    grid = (triton.cdiv(x.shape[0], size.rows) * triton.cdiv(out.shape[1], size.columns),)
    _linear[grid](
        x, w, low, up, w if bias is None else bias, start, out,
        x.shape[0], out.shape[1], x.shape[1],
        x.stride(0), w.stride(0), low.stride(0), up.stride(0), start.stride(0), out.stride(0),
        SWAPPED=swapped, LORA=u is not None, BIAS=bias is not None, ADD=before is not None,
        RANK=low.shape[1] if u is not None else 16,
        ROWS=size.rows, COLUMNS=size.columns, INNER=size.inner, IEEE=x.dtype == torch.float32,
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return out


def linears(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    factors: tuple[Factors | None, ...],
    scale: float,
    biases: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, ...]:
    """See `kernels.lora.lora_linears`."""
    flat = [t for factor in factors if factor is not None for t in factor]
    present = tuple(factor is not None for factor in factors)
    outputs: tuple[torch.Tensor, ...] = _Linears.apply(x, weights, biases, present, scale, *flat)
    return outputs


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        biases: tuple[torch.Tensor | None, ...],
        present: tuple[bool, ...],
        scale: float,
        *flat: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        pairs = iter(zip(flat[0::2], flat[1::2], strict=True))
        us, outputs = [], []
        stacked = _product(x, torch.cat([a.to(x.dtype) for a in flat[0::2]]).T) if flat else x.new_empty(len(x), 0)
        parts = iter(stacked.split([a.shape[0] for a in flat[0::2]], dim=1)) if flat else iter(())
        for weight, bias, has_factor in zip(weights, biases, present, strict=True):
            out = x.new_empty(x.shape[0], weight.shape[0])
            u = b = None
            if has_factor:
                u, b = _pad_rank(next(parts) * scale, x.dtype), _pad_rank(next(pairs)[1], x.dtype)
                us.append(u)
            outputs.append(_launch(x, weight, u, b, out, swapped=False, bias=bias))
        ctx.save_for_backward(x, *us, *flat)
        ctx.weights, ctx.present, ctx.scale = weights, present, scale
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        count = sum(ctx.present)
        x, us, flat = ctx.saved_tensors[0], ctx.saved_tensors[1 : 1 + count], ctx.saved_tensors[1 + count :]
        triples = iter(zip(us, flat[0::2], flat[1::2], strict=True))
        last = len(ctx.weights) - 1
        sum_x: torch.Tensor | None = None
        grads: list[torch.Tensor | None] = []
        for i, (weight, has_factor) in enumerate(zip(ctx.weights, ctx.present, strict=True)):
            g, d_u, a_rows = upstream[i], None, None
            if has_factor:
                u, a, b = next(triples)
                full = _product(g, b.to(x.dtype)) * ctx.scale
                grads.append(_product(full.T.to(x.dtype), x).to(a.dtype))
                grads.append(_product(g.T, u[:, : a.shape[0]]).to(b.dtype))
                d_u, a_rows = _pad_rank(full, x.dtype), _aligned(_pad_rank(a.T, x.dtype).T.contiguous())
            if ctx.needs_input_grad[0]:
                # The sum over the group stays in fp32 until its last term.
                out = torch.empty(x.shape, dtype=x.dtype if i == last else torch.float32, device=x.device)
                sum_x = _launch(g, weight, d_u, a_rows, out, swapped=True, before=sum_x)
        return sum_x, None, None, None, None, *grads
