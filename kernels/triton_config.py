"""Tile sizes of the Triton kernels: one fixed table, no autotuning.

A row's result depends on the tile sizes and on nothing else (not on how many rows there are), so the same row
gives the same bits in any batch. An autotuner would choose by shape and by the noise of the moment. Every row
of the table is compiled ahead of time for sm_90 in the tests: no spills, at most 227 KiB of shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of rows, columns and the summed dimension; warps and pipeline stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


HALF = (torch.bfloat16, torch.float16)
_HEAD = {True: Tile(128, 128, 64, 8, 3), False: Tile(64, 64, 32, 4, 2)}
_LINEAR = {True: Tile(128, 128, 64, 8, 3), False: Tile(64, 64, 32, 4, 2)}
# By (half precision, head_dim); rows are queries, columns keys.
_ATTENTION_FORWARD = {
    (True, 16): Tile(128, 64, 16, 4, 2),
    (True, 32): Tile(128, 64, 32, 4, 2),
    (True, 64): Tile(128, 64, 64, 4, 3),
    (True, 128): Tile(128, 64, 128, 8, 2),
    (False, 16): Tile(64, 32, 16, 4, 1),
    (False, 32): Tile(64, 32, 32, 4, 1),
    (False, 64): Tile(32, 32, 64, 8, 1),
    (False, 128): Tile(32, 32, 128, 8, 1),
}
_ATTENTION_BACKWARD = {
    (True, 16): Tile(64, 64, 16, 4, 2),
    (True, 32): Tile(64, 64, 32, 4, 2),
    (True, 64): Tile(64, 64, 64, 4, 2),
    (True, 128): Tile(64, 64, 128, 8, 2),
    (False, 16): Tile(32, 32, 16, 4, 1),
    (False, 32): Tile(32, 32, 32, 4, 1),
    (False, 64): Tile(32, 32, 64, 8, 1),
    (False, 128): Tile(16, 32, 128, 8, 1),
}


def head(dtype: torch.dtype) -> Tile:
    """The product of hidden rows with the head's weight."""
    return _HEAD[dtype in HALF]


def head_gradient(dtype: torch.dtype, capped: bool) -> Tile:
    """The same product where its epilogue forms the gradient; with a soft-cap the larger tile spills."""
    return Tile(128, 64, 64, 8, 3) if capped and dtype in HALF else head(dtype)


def linear(dtype: torch.dtype) -> Tile:
    """The LoRA linears' product."""
    return _LINEAR[dtype in HALF]


def attention_forward(dtype: torch.dtype, head_dim: int) -> Tile:
    """Forward. head_dim 256 is left out: no tile of its backward fits in the registers (measured)."""
    return _ATTENTION_FORWARD[dtype in HALF, head_dim]


def attention_backward(dtype: torch.dtype, head_dim: int) -> Tile:
    """The backward's two passes."""
    return _ATTENTION_BACKWARD[dtype in HALF, head_dim]
