"""Segment attention against the float64 oracle, and against separate forwards of every chain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernels.attention import register_attention, segment_attention
from kernels.dispatch import UnsupportedError
from kernels.layout import Layout
from tests.kernels.inputs import attention_inputs, relative_error, tree_layout
from tests.kernels.test_layout import layouts


def outputs_and_gradients(inputs: list[torch.Tensor], layout: Layout, impl: str) -> list[torch.Tensor]:
    q, k, v, upstream = inputs
    out = segment_attention(q, k, v, layout, scale=0.3, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_reference_equals_separate_sequences(heads: int, kv_heads: int) -> None:
    """Each chain on its own through PyTorch's attention: nothing of the packing is in this oracle."""
    layout = tree_layout()
    q, k, v, _ = attention_inputs(layout.n_tokens, heads, kv_heads, 16, torch.float64)
    out = segment_attention(q, k, v, layout, impl="reference")
    for s in range(layout.n_segments):
        index = torch.cat([torch.arange(layout.starts[a], layout.starts[a + 1]) for a in layout.chain(s)])
        alone = torch.nn.functional.scaled_dot_product_attention(
            *(x[index].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        own = slice(layout.starts[s], layout.starts[s + 1])
        torch.testing.assert_close(out[own], alone[len(index) - layout.lengths[s] :], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (9, 3, 64), (4, 4, 20), (3, 1, 128)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_cpu_equals_reference(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, limit: float) -> None:
    layout = tree_layout()
    inputs = attention_inputs(layout.n_tokens, heads, kv_heads, head_dim, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got, want = outputs_and_gradients(inputs, layout, "cpu"), outputs_and_gradients(wide, layout, "reference")
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < limit


def test_bf16_is_as_exact_as_the_bf16_reference(bf16_products: str) -> None:
    layout = tree_layout()
    inputs = attention_inputs(layout.n_tokens, 6, 2, 32, torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    want = outputs_and_gradients(wide, layout, "reference")
    got, peer = (
        outputs_and_gradients(inputs, layout, "cpu"),
        outputs_and_gradients(inputs, layout, "reference"),
    )
    for g, p, w in zip(got, peer, want, strict=True):
        assert relative_error(g, w) <= 1.25 * relative_error(p, w)


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_any_forest(layout: Layout) -> None:
    inputs = attention_inputs(layout.n_tokens, 4, 2, 8, torch.float64)
    got, want = (
        outputs_and_gradients(inputs, layout, "cpu"),
        outputs_and_gradients(inputs, layout, "reference"),
    )
    assert all(torch.allclose(g, w, rtol=0, atol=1e-12) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("tile", [1, 7, 128])
def test_tiles_change_no_number_by_more_than_rounding(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import attention_cpu

    monkeypatch.setattr(attention_cpu, "_TILE_QUERIES", tile)
    attention_cpu.plan.cache_clear()
    inputs = attention_inputs(tree_layout().n_tokens, 4, 2, 16, torch.float64)
    got = outputs_and_gradients(inputs, tree_layout(), "cpu")
    attention_cpu.plan.cache_clear()
    want = outputs_and_gradients(inputs, tree_layout(), "reference")
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_changes_no_bit_of_another(dtype: torch.dtype) -> None:
    """areal-project/AReaL#1442, huggingface/transformers#46634: packed rows must not see other samples."""
    layout = Layout.from_lengths([12, 6, 5, 9, 4, 8, 3], [-1, 0, 0, 1, 1, 2, 2])
    inputs = attention_inputs(layout.n_tokens, 6, 2, 32, dtype)
    before = outputs_and_gradients(inputs, layout, "cpu")
    changed = [x.detach().clone() for x in inputs]
    sample = slice(layout.starts[3], layout.starts[4])
    for x in changed[:3]:
        x[sample] = torch.randn_like(x[sample]) * 30
    after = outputs_and_gradients([x.requires_grad_() for x in changed[:3]] + changed[3:], layout, "cpu")
    others = torch.ones(layout.n_tokens, dtype=torch.bool)
    others[sample] = False
    assert torch.equal(before[0][others], after[0][others])
    assert not torch.equal(before[0], after[0])
    # Leaves have no descendants, so the gradients of their own rows are as independent as the outputs.
    for s in (4, 5, 6):
        own = slice(layout.starts[s], layout.starts[s + 1])
        assert all(torch.equal(b[own], a[own]) for b, a in zip(before[1:], after[1:], strict=True))


def test_strided_inputs_are_read_by_their_strides() -> None:
    """NVIDIA/TransformerEngine#2734: transformers hands over transposed views."""
    layout = tree_layout()
    inputs = attention_inputs(layout.n_tokens, 6, 2, 16, torch.float32)
    views = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in inputs[:3]]
    want = outputs_and_gradients(inputs, layout, "cpu")
    upstream = inputs[3].transpose(0, 1).contiguous().transpose(0, 1)
    got = outputs_and_gradients([*views, upstream], layout, "cpu")
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_no_tokens() -> None:
    q = torch.empty(0, 4, 8, requires_grad=True)
    out = segment_attention(q, q[:, :2], q[:, :2], Layout((0,), ()), impl="cpu")
    out.sum().backward()
    assert out.shape == (0, 4, 8)
    assert q.grad is not None


@pytest.mark.parametrize(
    ("shapes", "tokens", "message"),
    [
        (((4, 3, 8), (4, 2, 8)), 4, "multiple of 2 kv_heads"),
        (((4, 4, 8), (4, 2, 16)), 4, "head_dim"),
        (((4, 4, 8), (4, 2, 8)), 5, "layout has 5 tokens"),
        (((4, 4), (4, 2)), 4, r"\[tokens, heads, head_dim\]"),
    ],
)
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], tokens: int, message: str) -> None:
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        segment_attention(q, k, k, Layout((0, tokens), (-1,)))


def test_mixed_dtypes_are_refused() -> None:
    q = torch.zeros(2, 2, 8)
    with pytest.raises(ValueError, match="one dtype"):
        segment_attention(q, q.double(), q.double(), Layout((0, 2), (-1,)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shared_prefix_inside_transformers(family: str) -> None:
    """A packed tree through a random model equals a clean forward of every chain (unslothai/unsloth-zoo#840)."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    register_attention("rlvr")
    options = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "attn_implementation": "sdpa",
    }  # fmt: skip
    config = LlamaConfig(**options) if family == "llama" else Qwen3Config(**options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    layout = Layout.from_lengths([5, 4, 3, 6, 1], [-1, 0, 1, 1, 0])
    ids = torch.randint(0, 61, (1, layout.n_tokens))
    alone = {}
    for s in range(layout.n_segments):
        index = torch.cat([torch.arange(layout.starts[a], layout.starts[a + 1]) for a in layout.chain(s)])
        alone[s] = model(ids[:, index], use_cache=False).logits[0, len(index) - layout.lengths[s] :]
    model.set_attn_implementation("rlvr")
    packed = model(ids, position_ids=layout.positions()[None], use_cache=False, layout=layout).logits[0]
    for s, want in alone.items():
        torch.testing.assert_close(packed[layout.starts[s] : layout.starts[s + 1]], want, rtol=0, atol=1e-12)


def test_transformers_function_refuses_what_it_does_not_do() -> None:
    from kernels.attention import _transformers_attention as attend

    q = torch.zeros(1, 4, 3, 8)
    module, layout = torch.nn.Module(), Layout((0, 3), (-1,))
    with pytest.raises(ValueError, match="layout="):
        attend(module, q, q, q, None)
    two_rows = q.expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="layout has 3 tokens, q 6"):
        attend(module, two_rows, two_rows, two_rows, None, layout=layout)
    with pytest.raises(ValueError, match="use_cache=False"):
        attend(module, q, torch.zeros(1, 4, 5, 8), q, None, layout=layout)
    for option in ("sliding_window", "softcap", "s_aux"):
        with pytest.raises(UnsupportedError, match=option):
            attend(module, q, q, q, None, layout=layout, **{option: 4})
    with pytest.raises(UnsupportedError, match="attention_mask"):
        attend(module, q, q, q, torch.zeros(1), layout=layout)
    with pytest.raises(UnsupportedError, match="dropout"):
        attend(module, q, q, q, None, dropout=0.1, layout=layout)
