"""The head on a CPU: chunks of rows against tiles of the vocabulary that stay in cache, gradient in place.

`token_loss` keeps the tiles of one chunk (`[CHUNK, vocab]`) until their gradient is formed; `token_logprobs`
keeps nothing but two numbers a row and recomputes. The arithmetic of a tile is in `lm_head_cpu_tiles`. Where
the CPU has no bf16 products, bf16 tiles of the weight are widened to fp32 in cache (`cpu_compute_dtype`).
"""

from __future__ import annotations

import torch

from kernels.dispatch import cpu_compute_dtype
from kernels.lm_head import HeadOptions, LossOfRows
from kernels.lm_head_cpu_tiles import (
    BLOCK,
    CHUNK,
    TILE,
    TiledHead,
    add_product,
    set_scaled_product,
    statistics,
    to_exponentials,
    to_gradient,
)
from kernels.lm_head_driver import Logprobs, Loss, Rows, Sums


class CpuHead(TiledHead):
    """One call of the head on a CPU."""

    def statistics(self, x: torch.Tensor, u: torch.Tensor | None, target: torch.Tensor) -> Rows:
        """See `HeadKernel.statistics`."""
        return statistics(self, x, u, target)

    def gradient(
        self,
        x: torch.Tensor,
        u: torch.Tensor | None,
        stats: Rows,
        target: torch.Tensor,
        coefficients: tuple[torch.Tensor, torch.Tensor],
        rows: slice | torch.Tensor,
        sums: Sums,
    ) -> None:
        """See `HeadKernel.gradient`: from the kept tiles, or from recomputed ones where none are kept."""
        # The temperature's share of the chain rule: here it costs a row, not a tile.
        a, slope = (c / self.options.temperature for c in coefficients)
        b = slope if bool(slope.any()) else None
        picked = ((a != 0) | (slope != 0)).nonzero().flatten()
        if len(picked) == 0:
            return
        chunk, whole = len(a), len(picked) == len(a)
        if not whole:
            x, target, a, stats = x[picked], target[picked], a[picked], stats.pick(picked)
            u, b = (None if u is None else u[picked]), (None if b is None else b[picked])
            rows = picked + rows.start if isinstance(rows, slice) else rows[picked]
        d_x = torch.zeros(x.shape, dtype=self.wide) if sums.hidden is not None else None
        simple = self.native and not self.keeps_products and b is None and sums.weight is None
        d_u = torch.zeros(u.shape, dtype=self.wide) if u is not None else None
        for j, columns in self.tiles():
            w = self.rows_of_weight(columns)
            if self.keep:
                tile = self.buffer(j, chunk, columns)
                tile, peak = tile if whole else tile[picked], stats.tile_peak[j]
            else:
                tile, peak = self.product(x, w, j, columns), stats.peak
                if not self.keeps_products:
                    to_exponentials(self, tile, u, columns, stats)
            if simple and d_x is not None:
                set_scaled_product(d_x, tile, w, stats, a, target)
                continue
            g = to_gradient(self, tile, peak, u, stats, a, b, target, columns)
            self.multiply(g, w, x, u, columns, d_x, d_u, sums)
        if d_u is not None and self.a is not None:
            sums.add_low_rank(x, d_u, self.a, d_x)
        if d_x is not None and sums.hidden is not None:
            sums.hidden[rows] = d_x.to(sums.hidden.dtype)

    def multiply(
        self,
        g: torch.Tensor,
        w: torch.Tensor,
        x: torch.Tensor,
        u: torch.Tensor | None,
        columns: slice,
        d_x: torch.Tensor | None,
        d_u: torch.Tensor | None,
        sums: Sums,
    ) -> None:
        """Add what one tile of the gradient g `[rows, columns]` contributes to everything that is asked for."""
        if d_x is not None:
            if g.dtype == d_x.dtype:
                d_x.addmm_(g, w)
            else:
                add_product(d_x, g, w)
        if sums.weight is not None:
            # A bf16 product would round every chunk's share of the sum: widened, some columns at a time.
            wide_x = x.to(self.wide)
            for part, into in zip(g.split(TILE, dim=1), sums.weight[columns].split(TILE), strict=True):
                into.addmm_(part.T.to(self.wide), wide_x)
        if u is not None and d_u is not None and self.b is not None:
            wide, scale = g.to(self.wide), self.options.lora_scale
            d_u.addmm_(wide, self.b[columns], alpha=scale)
            if sums.b is not None:
                sums.b[columns].addmm_(wide.T, u, alpha=scale)


def workspace_bytes(rows: int, weight: torch.Tensor) -> int:
    """The kept tiles of one chunk and the small buffers; see `TiledHead`."""
    dtype, wide = cpu_compute_dtype(weight.dtype), torch.promote_types(weight.dtype, torch.float32)
    vocab, native = weight.shape[0], dtype != wide
    columns = vocab if native else min(TILE, vocab)
    kept = min(CHUNK, rows) * columns * -(-vocab // columns)
    hot = 0 if native else min(CHUNK, rows) * columns
    widened = 0 if weight.dtype == dtype else columns * weight.shape[1]
    return (kept + hot + widened) * dtype.itemsize + 2 * max(BLOCK, columns) * wide.itemsize


def logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    targets: torch.Tensor,
    valid: torch.Tensor | None,
    options: HeadOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.lm_head.token_logprobs`."""
    logprob, entropy = Logprobs.apply(hidden, weight, a, b, targets, valid, options, CpuHead)
    return logprob, entropy


def loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    targets: torch.Tensor,
    valid: torch.Tensor | None,
    options: HeadOptions,
    loss_of_rows: LossOfRows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.lm_head.token_loss`."""
    grad_mode = torch.is_grad_enabled()
    value, logprob, entropy = Loss.apply(
        hidden, weight, a, b, targets, valid, options, CpuHead, loss_of_rows, grad_mode
    )
    return value, logprob, entropy
