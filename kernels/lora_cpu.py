"""Grouped LoRA linears on a CPU.

In fp32 and with enough rows, a linear's effective weight W' = W + scale * B A is formed anew for each call (a
product that does not grow with the rows) and used once forward and once backward: y = x W'^T, dx = g W'. Its
rounding is that of one more fp32 addition to each weight, the size of the product's own. Forward, the W' of a
group and all its A stand below each other, so that x is read once and the outputs and x A^T are columns of one
product; x A^T is kept, and three skinny products are left for the factors' gradients.

With few rows, or where products are rounded to bf16 (an update is smaller than the weight's last bit there),
the low-rank part stays apart: one stacked product for all A, `u_i B_i^T` added in place by BLAS's own
accumulation.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.dispatch import cpu_compute_dtype
from kernels.lora import Factors

CHUNK_ROWS = 512  # rows of an upstream gradient that two products read one after the other, from cache


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


def merges(tokens: int, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the effective weight is formed: it must be cheaper than the products that it replaces.

    Forming it takes out * in multiply-adds a rank, adding the low-rank part apart tokens * (out + in).
    """
    out, width = weight.shape
    return dtype != torch.bfloat16 and tokens * (out + width) > 2 * out * width


def _stack(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).detach().to(dtype)


def _paired(present: tuple[bool, ...], flat: Any) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """A and B of every linear, None where it has none."""
    pairs = iter(zip(flat[0::2], flat[1::2], strict=True))
    return [next(pairs) if has else None for has in present]


def _effective(
    weight: torch.Tensor,
    factor: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
    tokens: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight in the compute dtype, with the low-rank part where `merges` says so."""
    w = weight.detach().to(dtype)
    if factor is None or not merges(tokens, weight, dtype):
        return w
    return torch.addmm(w, factor[1].to(dtype), factor[0].to(dtype), alpha=scale)


def _wide_forward(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    pairs: list[tuple[torch.Tensor, torch.Tensor] | None],
    scale: float,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every linear's output, columns of one product, and x A^T of all that have factors, `[tokens, sum of ranks]`."""
    sizes = [weight.shape[0] for weight in weights]
    ranks = [pair[0].shape[0] for pair in pairs if pair is not None]
    right = torch.empty(sum(sizes) + sum(ranks), x.shape[1], dtype=x.dtype)
    *rows, a_rows = right.split([*sizes, sum(ranks)])
    for into, weight, pair in zip(rows, weights, pairs, strict=True):
        w = weight.detach().to(x.dtype)
        if pair is None:
            into.copy_(w)
        else:
            torch.addmm(w, pair[1].to(x.dtype), pair[0].to(x.dtype), alpha=scale, out=into)
    torch.cat([pair[0].detach().to(x.dtype) for pair in pairs if pair is not None], out=a_rows)
    *outputs, u = torch.nn.functional.linear(x, right).split([*sizes, sum(ranks)], 1)
    for y, bias in zip(outputs, biases, strict=True):
        if bias is not None:
            y.add_(bias.to(x.dtype))
    return outputs, u.clone()  # a copy, or all outputs would live as long


class _InputGradient:
    """dL/dx, summed over a group's linears, with room behind each row for g B.

    g W' and g B read the same g, and B is a few more columns of the right side: one product instead of two saves
    a pass over g, which is what the narrow one costs.
    """

    def __init__(self, x: torch.Tensor, rank: int, dtype: torch.dtype) -> None:
        self.width = x.shape[1]
        self._wide = torch.empty(x.shape[0], self.width + rank, dtype=dtype)
        self.rows = self._wide[:, : self.width]
        self._started = False

    def add(self, g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add g W; the sum so far."""
        torch.addmm(self.rows, g, weight, beta=int(self._started), out=self.rows)
        self._started = True
        return self.rows

    def add_merged(
        self,
        g: torch.Tensor,
        weight: torch.Tensor,
        factor: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        u: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add g (W + scale B A); g B `[tokens, r]`, valid until the next call, and u^T g `[r, out]`.

        g is the largest thing that is read here, so both products take it in chunks that stay in cache in between.
        """
        (a, b), dtype = factor, self._wide.dtype
        right = torch.empty(weight.shape[0], self.width + b.shape[1], dtype=dtype)
        right[:, self.width :] = b
        torch.addmm(weight.detach().to(dtype), b.to(dtype), a.to(dtype), alpha=scale, out=right[:, : self.width])
        into = self._wide[:, : right.shape[1]]
        if self._started:
            into[:, self.width :].zero_()  # else nothing of `into` is read
        u_g = torch.empty(u.shape[1], weight.shape[0], dtype=dtype)
        for start in range(0, g.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            torch.addmm(into[rows], g[rows], right, beta=int(self._started), out=into[rows])
            torch.addmm(u_g, u[rows].T, g[rows], beta=int(start > 0), out=u_g)
        self._started = True
        return into[:, self.width :], u_g


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
        dtype, tokens = cpu_compute_dtype(x.dtype), x.shape[0]
        wide_x = x.to(dtype)
        outputs: list[torch.Tensor] = []
        pairs = _paired(present, flat)
        ctx.weights, ctx.present, ctx.scale = weights, present, scale
        if flat and all(merges(tokens, w, dtype) for w, pair in zip(weights, pairs, strict=True) if pair is not None):
            outputs, u = _wide_forward(wide_x, weights, biases, pairs, scale)
            ctx.save_for_backward(x, u, *flat)
            return tuple(y.to(x.dtype) for y in outputs)
        apart = [pair[0] for w, pair in zip(weights, pairs, strict=True) if pair and not merges(tokens, w, dtype)]
        us = iter((wide_x @ _stack(apart, dtype).T).split([a.shape[0] for a in apart], 1)) if apart else iter(())
        for weight, bias, pair in zip(weights, biases, pairs, strict=True):
            w = _effective(weight, pair, scale, tokens, dtype)
            y = torch.nn.functional.linear(wide_x, w, None if bias is None else bias.to(dtype))
            if pair is not None and not merges(tokens, weight, dtype):
                y.addmm_(next(us), pair[1].to(dtype).T, alpha=scale)
            outputs.append(y.to(x.dtype))
        ctx.save_for_backward(x, None, *flat)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, u, *flat = ctx.saved_tensors
        dtype, scale, tokens = cpu_compute_dtype(x.dtype), ctx.scale, x.shape[0]
        wide_x = x.to(dtype)
        ranks = [a.shape[0] for a in flat[0::2]]
        d_x = _InputGradient(x, max(ranks, default=0), dtype) if ctx.needs_input_grad[0] else None
        a_rows = _stack(flat[0::2], dtype) if flat else wide_x[:0]
        u, d_u = wide_x @ a_rows.T if u is None else u, torch.empty(tokens, sum(ranks), dtype=dtype)
        columns = iter(zip(u.split(ranks, 1), d_u.split(ranks, 1), a_rows.split(ranks), strict=True)) if flat else None
        d_bs: list[torch.Tensor] = []
        for i, (weight, pair) in enumerate(zip(ctx.weights, _paired(ctx.present, flat), strict=True)):
            g = upstream[i].to(dtype)
            if pair is None or columns is None:
                if d_x is not None:
                    d_x.add(g, weight.detach().to(dtype))
                continue
            part, d_part, a = next(columns)
            if d_x is not None and merges(tokens, weight, dtype):
                g_b, u_g = d_x.add_merged(g, weight, pair, scale, part)
                torch.mul(g_b, scale, out=d_part)
            else:
                d_part.copy_(torch.mm(g, pair[1].to(dtype)).mul_(scale))
                if d_x is not None:
                    d_x.add(g, weight.detach().to(dtype)).addmm_(d_part, a)
                u_g = torch.mm(part.T, g)
            # B's gradient's transpose has the same sums in the same order, and is the faster way round for BLAS.
            d_bs.append(u_g.mul_(scale).to(pair[1].dtype).T.contiguous())
        grads: list[torch.Tensor | None] = []
        if flat:
            d_as = torch.mm(d_u.T, wide_x).split(ranks)
            grads = [t for i, d_b in enumerate(d_bs) for t in (d_as[i].to(flat[2 * i].dtype), d_b)]
        return (None if d_x is None else d_x.rows.to(x.dtype)), None, None, None, None, *grads
