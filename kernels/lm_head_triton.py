"""The head on CUDA: one Triton product whose epilogue takes the statistics from fp32 logits still in
registers.

`_project` multiplies a tile of rows with a tile of the vocabulary and either reduces the logits to three
numbers a row and tile, or also stores e = exp(z - tile's peak) in the weight's dtype, or turns them straight
into their gradient. Log-probs and entropies so never see a rounded logit; a stored e carries one relative
rounding. `_to_gradient` turns stored exponentials into the gradient in place. Products with the gradient go
to cuBLAS with fp32 results.

No atomics, no split sums, tiles from one fixed table: a row's log-prob is the same to the bit in any batch.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a Triton kernel are pointers and compile-time values, for which Python has no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import triton_config
from kernels.lm_head import HeadOptions, LossOfRows
from kernels.lm_head_driver import HeadKernel, Logprobs, Loss, Rows, Sums, combine

_BUFFER_BYTES = 1 << 29  # of kept exponentials or gradient a chunk: 1,700 rows of a vocabulary of 151,936 in bf16
_MAX_CHUNK = 8192  # rows
_PART = 16384  # columns of the vocabulary at a time where a product needs a temporary
_TINY = tl.constexpr(1.1754944e-38)  # the smallest normal fp32


@triton.jit
def _project(
    x_ptr, w_ptr, u_ptr, b_ptr, target_ptr,
    peak_ptr, total_ptr, moment_ptr, chosen_ptr,
    row_peak_ptr, row_log_sum_ptr, row_entropy_ptr, for_logprob_ptr, for_entropy_ptr,
    out_ptr,
    tokens, vocab, width,
    stride_x, stride_w, stride_u, stride_b, stride_out,
    divisor, cap_over_temperature, temperature_over_cap,
    MODE: tl.constexpr, LORA: tl.constexpr, CAP: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """MODE 0: statistics. MODE 1: statistics and exponentials to out. MODE 2: gradient to out.

    x `[tokens, width]`, w `[vocab, width]`, u `[tokens, RANK]` (scaled) and b
    `[vocab, RANK]` fp32. Rows vary fastest, so that programs running together share one tile of the weight.
    """
    row_tiles = tl.cdiv(tokens, ROWS)
    pid = tl.program_id(0)
    column_tile = pid // row_tiles
    rows = (pid % row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    row_ok, column_ok = rows < tokens, columns < vocab
    # Offsets in int64: rows * vocab passes 2**31 at 14,134 rows of a vocabulary of 151,936.
    x_row = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    w_row = w_ptr + columns.to(tl.int64)[None, :] * stride_w
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, width, INNER):
        at = start + inner
        x = tl.load(x_row + at[None, :], mask=row_ok[:, None] & (at < width)[None, :], other=0.0)
        w = tl.load(w_row + at[:, None], mask=column_ok[None, :] & (at < width)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee") if IEEE else tl.dot(x, w, acc)
    if LORA:
        rank = tl.arange(0, RANK)
        u = tl.load(u_ptr + rows.to(tl.int64)[:, None] * stride_u + rank[None, :], mask=row_ok[:, None], other=0.0)
        b = tl.load(
            b_ptr + columns.to(tl.int64)[None, :] * stride_b + rank[:, None], mask=column_ok[None, :], other=0.0
        )
        # The factors are fp32 masters: rounded to bf16 they would be the largest error of a log-prob.
        acc = tl.dot(u, b, acc, input_precision="ieee") if IEEE else tl.dot(u, b, acc, input_precision="tf32")
    z = acc / divisor
    if CAP:
        # tanh(t) = 2 sigmoid(2 t) - 1: no libdevice, so that the interpreter runs the same code.
        z = cap_over_temperature * (2.0 * tl.sigmoid(2.0 * z) - 1.0)
    target = tl.load(target_ptr + rows, mask=row_ok, other=-1)
    hit = columns[None, :] == target[:, None]
    out_at = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    both = row_ok[:, None] & column_ok[None, :]
    if MODE == 2:
        row_peak = tl.load(row_peak_ptr + rows, mask=row_ok, other=0.0)
        log_sum = tl.load(row_log_sum_ptr + rows, mask=row_ok, other=0.0)
        entropy = tl.load(row_entropy_ptr + rows, mask=row_ok, other=0.0)
        fa = tl.load(for_logprob_ptr + rows, mask=row_ok, other=0.0)
        fb = tl.load(for_entropy_ptr + rows, mask=row_ok, other=0.0)
        logp = (z - row_peak[:, None]) - log_sum[:, None]
        # A dead column's logit may be above the peak: its exponential is never formed.
        p = tl.exp(tl.where(both, logp, 0.0))
        g = tl.where(hit, fa[:, None], 0.0) - p * (fa[:, None] + fb[:, None] * (logp + entropy[:, None]))
        if CAP:
            slope = z * temperature_over_cap
            g = g * (1.0 - slope * slope)
        tl.store(out_at, g.to(out_ptr.dtype.element_ty), mask=both)
    else:
        peak = tl.max(tl.where(column_ok[None, :], z, float("-inf")), axis=1)
        d = tl.where(column_ok[None, :], z - peak[:, None], 0.0)
        e = tl.where(column_ok[None, :], tl.exp(d), 0.0)
        at = column_tile.to(tl.int64) * tokens + rows
        tl.store(peak_ptr + at, peak, mask=row_ok)
        tl.store(total_ptr + at, tl.sum(e, axis=1), mask=row_ok)
        tl.store(moment_ptr + at, tl.sum(e * d, axis=1), mask=row_ok)
        # One tile holds the target: no other program writes this row.
        low = column_tile * COLUMNS
        inside = row_ok & (target >= low) & (target < low + COLUMNS) & (target < vocab)
        tl.store(chosen_ptr + rows, tl.sum(tl.where(hit, z, 0.0), axis=1), mask=inside)
        if MODE == 1:
            tl.store(out_at, e.to(out_ptr.dtype.element_ty), mask=both)


@triton.jit
def _to_gradient(
    e_ptr, target_ptr, peak_ptr,
    row_peak_ptr, row_log_sum_ptr, row_entropy_ptr, for_logprob_ptr, for_entropy_ptr,
    tokens, vocab, stride_e, temperature_over_cap,
    CAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """e = exp(z - tile's peak) `[tokens, vocab]` becomes dL/draw in place; COLUMNS is `_project`'s."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column_tile = tl.program_id(0)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row_ok = rows < tokens
    both = row_ok[:, None] & (columns < vocab)[None, :]
    at = e_ptr + rows.to(tl.int64)[:, None] * stride_e + columns[None, :]
    e = tl.load(at, mask=both, other=1.0).to(tl.float32)
    tile_peak = tl.load(peak_ptr + column_tile.to(tl.int64) * tokens + rows, mask=row_ok, other=0.0)
    row_peak = tl.load(row_peak_ptr + rows, mask=row_ok, other=0.0)
    log_sum = tl.load(row_log_sum_ptr + rows, mask=row_ok, other=0.0)
    entropy = tl.load(row_entropy_ptr + rows, mask=row_ok, other=0.0)
    fa = tl.load(for_logprob_ptr + rows, mask=row_ok, other=0.0)
    fb = tl.load(for_entropy_ptr + rows, mask=row_ok, other=0.0)
    target = tl.load(target_ptr + rows, mask=row_ok, other=-1)
    shift = tile_peak - row_peak - log_sum
    # Where e underflowed to 0 the probability is 0 and any finite logarithm does.
    d = tl.log(tl.maximum(e, _TINY))
    p = e * tl.exp(shift)[:, None]
    g = tl.where(columns[None, :] == target[:, None], fa[:, None], 0.0)
    g -= p * (fa[:, None] + fb[:, None] * (d + shift[:, None] + entropy[:, None]))
    if CAP:
        slope = (d + tile_peak[:, None]) * temperature_over_cap
        g = g * (1.0 - slope * slope)
    tl.store(at, g.to(e_ptr.dtype.element_ty), mask=both)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix product with an fp32 result: bf16 partial sums never leave the tensor cores."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension contiguous and 16-byte rows: what the pipelined product is compiled for."""
    unit = 16 // x.element_size()
    if x.stride(1) == 1 and x.stride(0) % unit == 0 and x.data_ptr() % 16 == 0:
        return x
    room = x.new_empty(x.shape[0], -(-x.shape[1] // unit) * unit)
    room[:, : x.shape[1]] = x
    return room[:, : x.shape[1]]


def padded_rank(rank: int) -> int:
    """The rank a low-rank product is compiled for: a power of two, at least what a tensor core takes."""
    return max(16, triton.next_power_of_2(rank))


def _pad_rank(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[n, r]` in the compute dtype with zero columns up to `padded_rank`."""
    wide = x.new_zeros(x.shape[0], padded_rank(x.shape[1]), dtype=dtype)
    wide[:, : x.shape[1]] = x
    return wide


class TritonHead(HeadKernel):
    """One call of the head on CUDA."""

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
        super().__init__(weight, a, b, options, weight.dtype, keep=keep)
        self.weight = _aligned(self.weight)
        self.size = triton_config.head(weight.dtype)
        vocab = weight.shape[0]
        unit = 16 // weight.element_size()
        self.row_size = -(-vocab // unit) * unit
        fit = _BUFFER_BYTES // (self.row_size * weight.element_size()) // self.size.rows * self.size.rows
        self.chunk = max(self.size.rows, min(_MAX_CHUNK, fit))
        self.buffer: torch.Tensor | None = None
        self.tokens = tokens
        self.low_rank = None if self.b is None else _pad_rank(self.b, self.wide)

    def room(self, rows: int) -> torch.Tensor:
        """`[rows, vocab]` of the buffer that every chunk reuses, rows aligned to 16 bytes."""
        if self.buffer is None:
            self.buffer = self.weight.new_empty(min(self.chunk, self.tokens), self.row_size)
        return self.buffer[:rows, : self.weight.shape[0]]

    def project(
        self,
        mode: int,
        x: torch.Tensor,
        u: torch.Tensor | None,
        target: torch.Tensor,
        partials: torch.Tensor,
        chosen: torch.Tensor,
        per_row: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        """Launch `_project`; partials `[3, tiles, rows]`, per_row: peak, log_sum, entropy and the coefficients."""
        x, size, (vocab, width), options = _aligned(x), self.size, self.weight.shape, self.options
        if mode == 2:
            size = triton_config.head_gradient(self.dtype, options.softcap is not None)
        low = x if u is None else _pad_rank(u * options.lora_scale, self.wide)
        b = self.weight if self.low_rank is None else self.low_rank
        cap = options.softcap if options.softcap is not None else 1.0
        grid = (triton.cdiv(x.shape[0], size.rows) * triton.cdiv(vocab, size.columns),)
        _project[grid](
            x, self.weight, low, b, target, *partials, chosen, *per_row, out,
            x.shape[0], vocab, width,
            x.stride(0), self.weight.stride(0), low.stride(0), b.stride(0), out.stride(0),
            self.divisor, cap / options.temperature, options.temperature / cap,
            MODE=mode, LORA=u is not None, CAP=options.softcap is not None, RANK=low.shape[1] if u is not None else 16,
            ROWS=size.rows, COLUMNS=size.columns, INNER=size.inner, IEEE=self.dtype == torch.float32,
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip

    def statistics(self, x: torch.Tensor, u: torch.Tensor | None, target: torch.Tensor) -> Rows:
        """See `HeadKernel.statistics`; a target outside the vocabulary gives NaN."""
        n, tiles = x.shape[0], triton.cdiv(self.weight.shape[0], self.size.columns)
        partials = torch.empty(3, tiles, n, dtype=torch.float32, device=x.device)
        chosen = torch.full((n,), torch.nan, dtype=torch.float32, device=x.device)
        out = self.room(n) if self.keep else self.weight
        self.project(1 if self.keep else 0, x, u, target, partials, chosen, (chosen,) * 5, out)
        return combine(partials[0], partials[1], partials[2], chosen)

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
        """See `HeadKernel.gradient`."""
        a, b = (c.float().contiguous() / self.options.temperature for c in coefficients)
        picked = ((a != 0) | (b != 0)).nonzero().flatten()
        if len(picked) == 0:
            return
        g = self.room(x.shape[0])
        per_row = tuple(t.contiguous() for t in (stats.peak, stats.log_sum, stats.entropy, a, b))
        if self.keep:
            self.stored_to_gradient(g, stats, target, per_row)
        else:
            self.project(2, x, u, target, stats.peak.expand(3, -1), a, per_row, g)
        if 4 * len(picked) <= 3 * len(a):
            # Below that the copy costs more than the rows that it saves in the products.
            g, x, u = g[picked], x[picked], None if u is None else u[picked]
            rows = picked + rows.start if isinstance(rows, slice) else rows[picked]
        self.multiply(g, x, u, rows, sums)

    def stored_to_gradient(
        self, e: torch.Tensor, stats: Rows, target: torch.Tensor, per_row: tuple[torch.Tensor, ...]
    ) -> None:
        """Launch `_to_gradient` on the kept exponentials."""
        rows, cap = 16, self.options.softcap
        grid = (stats.tile_peak.shape[0], triton.cdiv(e.shape[0], rows))
        _to_gradient[grid](
            e, target, stats.tile_peak, *per_row, e.shape[0], e.shape[1], e.stride(0),
            self.options.temperature / cap if cap is not None else 1.0,
            CAP=cap is not None, ROWS=rows, COLUMNS=self.size.columns, num_warps=4,
        )  # fmt: skip

    def multiply(
        self, g: torch.Tensor, x: torch.Tensor, u: torch.Tensor | None, rows: slice | torch.Tensor, sums: Sums
    ) -> None:
        """Add what the gradient g `[rows, vocab]` contributes to everything that is asked for."""
        d_x = _product(g, self.weight) if sums.hidden is not None else None
        if sums.weight is not None:
            for part, into in zip(g.split(_PART, 1), sums.weight.split(_PART), strict=True):
                into += _product(part.T, x)
        if u is not None and self.a is not None and self.b is not None:
            d_u = torch.zeros_like(u)
            for start in range(0, g.shape[1], _PART):
                # Widened: rounding u or B to bf16 here would be the largest error of the factors' gradients.
                part = g[:, start : start + _PART].float()
                d_u.addmm_(part, self.b[start : start + _PART], alpha=self.options.lora_scale)
                if sums.b is not None:
                    sums.b[start : start + _PART].addmm_(part.T, u, alpha=self.options.lora_scale)
            sums.add_low_rank(x, d_u, self.a, d_x)
        if d_x is not None and sums.hidden is not None:
            sums.hidden[rows] = d_x.to(sums.hidden.dtype)


def workspace_bytes(rows: int, weight: torch.Tensor) -> int:
    """The buffer that every chunk reuses, and the copy of up to three quarters of it where rows are left out."""
    head = TritonHead(weight, None, None, HeadOptions(), rows, keep=True)
    return min(head.chunk, rows) * head.row_size * weight.element_size() * 7 // 4


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
    logprob, entropy = Logprobs.apply(hidden, weight, a, b, targets, valid, options, TritonHead)
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
        hidden, weight, a, b, targets, valid, options, TritonHead, loss_of_rows, grad_mode
    )
    return value, logprob, entropy
