"""Row offsets beyond 2**31 (huggingface/trl#7266, fla-org/flash-linear-attention#1080,
sgl-project/sglang#20389).

Memory is only mapped when touched, so a tensor with an enormous row stride costs nothing. The interpreter
runs with overflow checks: an int32 offset raises, where a GPU would silently read another row.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels import lm_head_triton
from kernels.attention import segment_attention
from kernels.layout import Layout
from kernels.lm_head import HeadOptions
from kernels.lora_triton import _launch

STRIDE = 1_200_000_000  # of two rows: 2.4e9 elements, above 2**31, with a stride that is itself an int32


def far_apart(rows: torch.Tensor) -> torch.Tensor:
    """A copy of at most three rows, `STRIDE` elements apart."""
    room = torch.empty(STRIDE * (rows.shape[0] - 1) + rows[0].numel(), dtype=rows.dtype)
    inner = rows[0].stride() if rows.dim() > 2 else (1,)
    far = room.as_strided(rows.shape, (STRIDE, *inner))
    return far.copy_(rows)


@triton.jit
def _narrow_offsets(x_ptr, out_ptr, stride, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    tl.store(out_ptr + rows, tl.load(x_ptr + rows * stride, mask=rows < 3), mask=rows < 3)


def test_the_checker_catches_an_int32_offset() -> None:
    x, out = far_apart(torch.ones(3, 1, dtype=torch.int8)), torch.zeros(3, dtype=torch.int8)
    with pytest.raises(Exception, match="int32 overflow"):
        _narrow_offsets[(1,)](x, out, STRIDE, ROWS=4)


def test_head() -> None:
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    target = torch.tensor([1, 39, 7])
    stats, grads = [], []
    for hidden in (x, far_apart(x)):
        for w in (weight, weight):
            head = lm_head_triton.TritonHead(w, None, None, HeadOptions(), 3, keep=True)
            if hidden is not x:
                head.buffer = far_apart(torch.zeros(3, 40, dtype=torch.bfloat16))
            stats.append(head.statistics(hidden, None, target))
            per_row = (stats[-1].peak, stats[-1].log_sum, stats[-1].entropy, torch.ones(3), torch.ones(3))
            head.stored_to_gradient(head.room(3), stats[-1], target, per_row)
            grads.append(head.room(3).clone())
    assert torch.equal(stats[0].logprob, stats[-1].logprob)
    assert torch.equal(grads[0], grads[-1])
    assert grads[0].any()


def test_lora_linear() -> None:
    x, w = torch.randn(3, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    want = _launch(x, w, None, None, torch.empty(3, 3, dtype=torch.bfloat16), swapped=False)
    out = far_apart(torch.zeros(3, 3, dtype=torch.bfloat16))
    got = _launch(far_apart(x), far_apart(w), None, None, out, swapped=False)
    assert torch.equal(got, want)


def test_attention() -> None:
    layout = Layout((0, 3), (-1,))
    near = [torch.randn(3, 1, 16).bfloat16().requires_grad_() for _ in range(3)]
    far = [far_apart(x.detach()).requires_grad_() for x in near]
    upstream = torch.randn(3, 1, 16).bfloat16()
    outs = [segment_attention(*x, layout, impl="triton") for x in (near, far)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(o, x, upstream) for o, x in zip(outs, (near, far), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
