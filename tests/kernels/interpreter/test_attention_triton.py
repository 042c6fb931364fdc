"""The attention kernels against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernels.attention import segment_attention
from kernels.attention_triton import tables
from kernels.layout import Layout
from tests.kernels.inputs import attention_inputs, relative_error, tree_layout
from tests.kernels.test_attention import outputs_and_gradients
from tests.kernels.test_layout import layouts


def compare(layout: Layout, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = attention_inputs(layout.n_tokens, *shape, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    want = outputs_and_gradients(wide, layout, "reference")
    got, peer = (outputs_and_gradients(inputs, layout, impl) for impl in ("triton", "reference"))
    for g, p, w in zip(got, peer, want, strict=True):
        limit = 1.25 * relative_error(p, w)
        assert relative_error(g, w) <= (max(limit, 3e-6) if dtype == torch.float32 else limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 32), (2, 2, 64), (2, 1, 128)], ids=str)
def test_tree(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    compare(tree_layout(), shape, dtype)


def test_segments_longer_than_a_block() -> None:
    compare(Layout.from_lengths([150, 70, 140, 1], [-1, 0, 0, 2]), (2, 1, 16), torch.float32)


@settings(max_examples=10, deadline=None)
@given(layouts(max_segments=5))
def test_any_forest(layout: Layout) -> None:
    if layout.n_tokens:
        compare(layout, (2, 1, 16), torch.float32)


def test_a_sample_changes_no_bit_of_another() -> None:
    layout = Layout.from_lengths([12, 6, 9, 4], [-1, 0, 1, 1])
    inputs = attention_inputs(layout.n_tokens, 4, 2, 16, torch.float32)
    before = outputs_and_gradients(inputs, layout, "triton")
    changed = [x.detach().clone() for x in inputs]
    for x in changed[:3]:
        x[18:27] = torch.randn_like(x[18:27]) * 30
    after = outputs_and_gradients([*(x.requires_grad_() for x in changed[:3]), changed[3]], layout, "triton")
    others = (torch.arange(layout.n_tokens) < 18) | (torch.arange(layout.n_tokens) >= 27)
    assert torch.equal(before[0][others], after[0][others])
    assert not torch.equal(before[0], after[0])
    assert all(torch.equal(b[27:], a[27:]) for b, a in zip(before[1:], after[1:], strict=True))


def test_a_chain_has_the_same_bits_alone_and_packed() -> None:
    """Batch invariance: a completion's output does not depend on what else is in the batch."""
    layout = Layout.from_lengths([12, 6, 9, 4], [-1, 0, 1, 1])
    q, k, v, _ = attention_inputs(layout.n_tokens, 4, 2, 16, torch.float32)
    packed = segment_attention(q, k, v, layout, impl="triton")
    index = torch.cat([torch.arange(18), torch.arange(27, 31)])
    alone = Layout.from_lengths([12, 6, 4], [-1, 0, 1])
    out = segment_attention(q[index], k[index], v[index], alone, impl="triton")
    assert torch.equal(out, packed[index])


def test_strided_inputs() -> None:
    layout = tree_layout()
    inputs = attention_inputs(layout.n_tokens, 4, 2, 16, torch.float32)
    views = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in inputs[:3]]
    want = outputs_and_gradients(inputs, layout, "triton")
    got = outputs_and_gradients([*views, inputs[3].transpose(0, 1).contiguous().transpose(0, 1)], layout, "triton")
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_tables_join_what_touches() -> None:
    """Header, two prompts, two completions each: the prompts' descendants are one range each, the header's one."""
    layout = Layout.from_lengths([4, 3, 3, 2, 2, 2, 2], [-1, 0, 0, 1, 1, 2, 2])
    t = tables(layout, 3, torch.device("cpu"))
    assert t.blocks.tolist() == [[0, 0], [0, 3], [1, 4], [2, 7], [3, 10], [4, 12], [5, 14], [6, 16]]
    assert t.child_offsets.tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    assert t.child_ranges.tolist() == [[4, 18], [10, 14], [14, 18]]
    assert t.prefix_ranges.tolist()[:3] == [[0, 4], [0, 4], [0, 7]]
