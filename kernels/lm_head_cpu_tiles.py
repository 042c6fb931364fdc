"""The head's arithmetic on one tile of the vocabulary, on a CPU, in two forms.

A tile's logits are replaced by e = exp(z - m) with m the row's largest logit of that tile, and m, sum(e) and
sum(e * (z - m)) are kept. From those few numbers a row's logsumexp and entropy follow, and p = e * exp(m - lse)
is one multiplication away: the gradient needs no second exponential.

Wide (fp32 or float64 products): a tile is some columns that stay in cache.

Native (bf16 products, on CPUs that have them): the tile is the whole vocabulary, and the arithmetic happens in fp32
on blocks of a few rows that stay in cache; e goes back rounded, into the products' place. Where the gradient's rows
are multiples of those of e but for the target's column, which is the usual case, e itself is multiplied with the
weight and the rows are scaled afterwards (`set_scaled_product`). With a soft-cap or LoRA on the head the products stay
instead and e is formed twice: a gradient that needs the logits back would feel the rounding of e.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kernels.dispatch import cpu_compute_dtype
from kernels.lm_head import HeadOptions
from kernels.lm_head_driver import HeadKernel, Rows, combine

CHUNK = 256  # rows; 512 are no faster and take twice the room (docs/decisions.md)
NATIVE_COLUMNS = 8192  # of a bf16 product with the weight: some per cent faster than the whole vocabulary at once
TILE = 2048  # columns: 2 MiB of fp32 logits for 256 rows, in cache between the product and what is made of it
LN_2 = math.log(2)
BLOCK = 1 << 18  # elements of fp32 arithmetic at a time


class TiledHead(HeadKernel):
    """The weight and LoRA factors in tiles, with the buffers that every chunk reuses."""

    chunk = CHUNK

    def __init__(
        self,
        weight: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        options: HeadOptions,
        tokens: int,
        *,
        keep: bool,
    ) -> None:
        super().__init__(weight, a, b, options, cpu_compute_dtype(weight.dtype), keep=keep)
        self.native = self.dtype != self.wide
        self.keeps_products = self.native and (options.softcap is not None or a is not None)
        self.tile = weight.shape[0] if self.native else min(TILE, weight.shape[0])
        self.count = -(-weight.shape[0] // self.tile)
        rows = min(self.chunk, tokens)
        self.kept = torch.empty((self.count if keep else 1) * rows * self.tile, dtype=self.dtype)
        self.scratch = torch.empty(2, max(BLOCK, self.tile), dtype=self.wide)
        self.hot = torch.empty(0 if self.native else rows * self.tile, dtype=self.dtype)
        widened = 0 if weight.dtype == self.dtype else self.tile * weight.shape[1]
        self.widened = torch.empty(widened, dtype=self.dtype)

    def tiles(self) -> Iterator[tuple[int, slice]]:
        """`(number, columns)` of every tile."""
        vocab = self.weight.shape[0]
        for j, start in enumerate(range(0, vocab, self.tile)):
            yield j, slice(start, min(start + self.tile, vocab))

    def rows_of_weight(self, columns: slice) -> torch.Tensor:
        """The weight's rows for these columns in the compute dtype, valid until the next call."""
        part = self.weight[columns]
        if part.dtype == self.dtype:
            return part
        return self.widened[: part.numel()].view(part.shape).copy_(part)

    def buffer(self, j: int, rows: int, columns: slice) -> torch.Tensor:
        """Contiguous room for one tile, `[rows, columns]`."""
        size = rows * (columns.stop - columns.start)
        offset = j * rows * self.tile if self.keep else 0
        return self.kept[offset : offset + size].view(rows, -1)

    def blocks(self, tile: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Blocks of a tile's rows, each with two pieces of wide scratch of its shape."""
        columns = tile.shape[1]
        step = max(1, self.scratch.shape[1] // columns)
        for start in range(0, tile.shape[0], step):
            rows = slice(start, min(start + step, tile.shape[0]))
            first, second = self.scratch[:, : (rows.stop - rows.start) * columns].view(2, -1, columns)
            yield rows, first, second

    def hot_tile(self, rows: int, columns: slice) -> torch.Tensor:
        """Room for one tile that every tile shares, `[rows, columns]`: it stays in cache."""
        return self.hot[: rows * (columns.stop - columns.start)].view(rows, -1)

    def product(self, x: torch.Tensor, w: torch.Tensor, j: int, columns: slice) -> torch.Tensor:
        """Wide: `x @ w.T` over the soft-cap or temperature, in the hot tile. Native: undivided, in tile j."""
        if self.native:
            return torch.mm(x, w.T, out=self.buffer(j, x.shape[0], columns))
        z = torch.mm(x, w.T, out=self.hot_tile(x.shape[0], columns))
        # Not as the product's alpha: BLAS may fold that into the operands, which doubled the error.
        return self.divided(z)

    def divided(self, z: torch.Tensor) -> torch.Tensor:
        """Products over the soft-cap or temperature, in place."""
        return z if self.divisor == 1 else z.div_(self.divisor)

    def logits(
        self, tile: torch.Tensor, rows: slice, u: torch.Tensor | None, columns: slice, into: torch.Tensor
    ) -> torch.Tensor:
        """The finished logits of some rows of a native tile that holds products."""
        return self.finish(self.divided(into.copy_(tile[rows])), None if u is None else u[rows], columns)

    def finish(self, z: torch.Tensor, u: torch.Tensor | None, columns: slice) -> torch.Tensor:
        """Add the LoRA part of `u [rows, r]` to divided products in place, and apply the soft-cap."""
        if u is not None and self.b is not None:
            z.addmm_(u, self.b[columns].T, alpha=self.options.lora_scale / self.divisor)
        if self.options.softcap is not None:
            z.tanh_().mul_(self.options.softcap / self.options.temperature)
        return z

    def cap_slope(self, z: torch.Tensor) -> torch.Tensor:
        """d(softcap * tanh(raw / softcap)) / draw from z, in place."""
        assert self.options.softcap is not None
        return z.mul_(self.options.temperature / self.options.softcap).square_().neg_().add_(1)


def statistics(head: TiledHead, x: torch.Tensor, u: torch.Tensor | None, target: torch.Tensor) -> Rows:
    """One pass over the vocabulary; leaves exponentials in the head's buffers.

    x `[rows, width]` in the compute dtype, u `[rows, r]` = x A^T in the wide one, target int64 `[rows]`.
    """
    n = x.shape[0]
    peak, total, moment = (torch.empty(head.count, n, dtype=head.wide) for _ in range(3))
    chosen = torch.empty(n, dtype=head.wide)
    for j, columns in head.tiles():
        tile = head.product(x, head.rows_of_weight(columns), j, columns)
        if not head.native:
            head.finish(tile, u, columns)
            here = _targets_here(target, columns)
            chosen[here] = tile[here, target[here] - columns.start]
            _fold(tile, head.buffer(j, n, columns), peak[j], total[j], moment[j], native=False)
            continue
        for rows, z, e in head.blocks(tile):
            head.logits(tile, rows, u, columns, z)
            chosen[rows] = z.gather(1, target[rows, None]).squeeze(1)
            _fold(z, e, peak[j, rows], total[j, rows], moment[j, rows], native=True)
            if head.keep and not head.keeps_products:
                tile[rows] = e
    return combine(peak, total, moment, chosen)


def _fold(
    z: torch.Tensor, e: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, moment: torch.Tensor, *, native: bool
) -> None:
    """From logits z `[rows, columns]` (overwritten): e = exp(z - peak) and the three numbers of each row."""
    torch.amax(z, dim=1, out=peak)
    if native:
        _exponentials(z, peak, e)
    else:
        torch.exp(z.sub_(peak[:, None]), out=e)
    torch.sum(e, dim=1, out=total)
    torch.sum(z.mul_(e), dim=1, out=moment)
    if native:
        moment.mul_(LN_2)


def _exponentials(z: torch.Tensor, peak: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """e = exp(z - peak) by way of 2^x, in less than half the time of exp; z becomes (z - peak) / ln 2.

    The exponent's product with 1 / ln 2 is rounded, which is some 1e-7 of e: nothing beside bf16 products.
    """
    return torch.exp2(z.sub_(peak[:, None]).mul_(1 / LN_2), out=e)


def _targets_here(target: torch.Tensor, columns: slice) -> torch.Tensor:
    return ((target >= columns.start) & (target < columns.stop)).nonzero().flatten()


def to_exponentials(head: TiledHead, tile: torch.Tensor, u: torch.Tensor | None, columns: slice, stats: Rows) -> None:
    """A recomputed product becomes exp(z - peak) in place."""
    if not head.native:
        head.finish(tile, u, columns).sub_(stats.peak[:, None]).exp_()
        return
    for rows, z, e in head.blocks(tile):
        tile[rows] = _exponentials(head.logits(tile, rows, u, columns, z), stats.peak[rows], e)


def add_product(d_x: torch.Tensor, tile: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Add tile @ w of a native tile to d_x `[rows, width]`, which is fp32, in place."""
    for g, part in zip(tile.split(NATIVE_COLUMNS, dim=1), w.split(NATIVE_COLUMNS), strict=True):
        d_x.add_(torch.mm(g, part))
    return d_x


def set_scaled_product(
    d_x: torch.Tensor, tile: torch.Tensor, w: torch.Tensor, stats: Rows, a: torch.Tensor, target: torch.Tensor
) -> None:
    """dL/dx `[rows, width]` into d_x, which holds zeros in fp32, from a native tile of exponentials (overwritten).

    dL/dx = a (w_target - p W) = a ((1 - p_target) w_target - p' W) with p' = p but 0 at the target. The first form
    would take the difference of two nearly equal rows, one of them rounded, where the target is likely.
    """
    tile[torch.arange(len(target)), target] = 0
    scale = -a * torch.exp(stats.tile_peak[0] - stats.peak - stats.log_sum)
    add_product(d_x, tile, w).mul_(scale[:, None])
    d_x.addcmul_(w[target].to(d_x.dtype), (-a * torch.expm1(stats.logprob))[:, None])


def to_gradient(
    head: TiledHead,
    tile: torch.Tensor,
    tile_peak: torch.Tensor,
    u: torch.Tensor | None,
    stats: Rows,
    a: torch.Tensor,
    b: torch.Tensor | None,
    target: torch.Tensor,
    columns: slice,
) -> torch.Tensor:
    """dL/draw from a tile of exp(z - tile_peak), or of products where the head keeps those, in its place or in the
    hot tile.

    a, b: dL/dlogprob and dL/dentropy over the temperature, `[rows]`, b None where it is zero everywhere.
    """
    shift = tile_peak - stats.peak - stats.log_sum
    here = _targets_here(target, columns)
    if not head.native and b is None and head.options.softcap is None:
        g = head.hot_tile(tile.shape[0], columns)
        torch.mul(tile, (-a * torch.exp(shift))[:, None], out=g)
        return g.index_put_((here, target[here] - columns.start), a[here], accumulate=True)
    for rows, d, p in head.blocks(tile):
        if head.keeps_products:
            torch.exp(head.logits(tile, rows, u, columns, d).sub_(tile_peak[rows, None]), out=p)
        else:
            p.copy_(tile[rows])
            if b is not None or head.options.softcap is not None:
                # z - tile_peak; where e underflowed to 0 the probability is 0 and any finite value does.
                torch.clamp_min(p, torch.finfo(p.dtype).tiny, out=d).log_()
        p.mul_(torch.exp(shift[rows])[:, None])
        if b is None:
            p.mul_(-a[rows, None])
        else:
            p.mul_((d + (shift + stats.entropy)[rows, None]).mul_(-b[rows, None]).sub_(a[rows, None]))
        block = here[(here >= rows.start) & (here < rows.stop)]
        p.index_put_((block - rows.start, target[block] - columns.start), a[block], accumulate=True)
        if head.options.softcap is not None:
            p.mul_(head.cap_slope(d.add_(tile_peak[rows, None])))
        tile[rows] = p.to(tile.dtype)
    return tile
