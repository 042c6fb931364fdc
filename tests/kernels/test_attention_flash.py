"""The merge of FlashAttention passes, in float64.

FlashAttention itself needs a GPU; here its two varlen calls are written out from their definition, so that
what is tested is everything around them: which queries meet which keys, the merge, and the gradient from
merged statistics. `bench/gpu_kernels.py` runs the real calls.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

from kernels import attention_flash
from kernels.attention_flash import Pass, passes
from kernels.layout import Layout
from tests.kernels.inputs import attention_inputs
from tests.kernels.test_attention import outputs_and_gradients
from tests.kernels.test_layout import layouts


def pieces(p: Pass) -> list[tuple[slice, slice]]:
    q, k = p.query_offsets.tolist(), p.key_offsets.tolist()
    assert len(q) == len(k)
    assert max(b - a for a, b in itertools.pairwise(q)) == p.longest_query
    assert max(b - a for a, b in itertools.pairwise(k)) == p.longest_key
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Pass, scale: float) -> tuple[torch.Tensor, ...]:
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=q.dtype)
    for a, b in pieces(p):
        s = scores(q[a], k[b], p.causal, scale)
        lse[:, a] = s.logsumexp(2)
        out[a] = torch.einsum("hqk,khd->qhd", s.softmax(2), v[b].repeat_interleave(q.shape[1] // k.shape[1], 1))
    return out, lse, torch.empty(0), torch.empty(0)


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, p: Pass, random: object, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for a, b in pieces(p):
        prob = torch.exp(scores(q[a], k[b], p.causal, scale) - lse[:, a, None])
        d_prob = torch.einsum("qhd,khd->hqk", d_out[a], v[b].repeat_interleave(group, 1))
        ds = prob * (d_prob - (d_out[a] * out[a]).sum(2).T[..., None]) * scale
        dq[a] = torch.einsum("hqk,khd->qhd", ds, k[b].repeat_interleave(group, 1))
        for grad, left, right in ((dk, ds, q[a]), (dv, prob, d_out[a])):
            each = torch.einsum("hqk,qhd->khd", left, right)
            grad[b] = each.view(each.shape[0], -1, group, each.shape[2]).sum(2)
    return dq, dk, dv


def merged(inputs: list[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    q, k, v, upstream = inputs
    out = attention_flash.attention(q, k, v, layout, 0.3)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]


@settings(max_examples=30, deadline=None)
@given(layouts())
def test_any_forest(layout: Layout) -> None:
    if layout.n_tokens == 0:
        return
    inputs = attention_inputs(layout.n_tokens, 4, 2, 8, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_flash, "varlen_forward", forward)
        patch.setattr(attention_flash, "varlen_backward", backward)
        got = merged(inputs, layout)
    want = outputs_and_gradients(inputs, layout, "reference")
    assert all(torch.allclose(g, w, rtol=0, atol=1e-12) for g, w in zip(got, want, strict=True))


def test_one_call_a_level() -> None:
    layout = Layout.from_lengths([4, 3, 3, 2, 2, 2, 2], [-1, 0, 0, 1, 1, 2, 2])
    own, header, prompts = passes(layout, torch.device("cpu"))
    assert own.causal
    assert not header.causal
    assert not prompts.causal
    assert header.query_rows is not None
    assert prompts.query_rows is not None
    assert prompts.key_rows is not None
    assert header.query_rows.tolist() == list(range(4, 18))
    assert prompts.query_rows.tolist() == list(range(10, 18))
    assert prompts.key_rows.tolist() == list(range(4, 10))
    assert prompts.query_offsets.tolist() == [0, 4, 8]
    assert prompts.key_offsets.tolist() == [0, 3, 6]


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward"])
def test_pytorch_still_has_the_calls(name: str) -> None:
    """They are PyTorch's own but not public: a rename must fail here, not on the first GPU."""
    arguments = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]
    wanted = {"query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal", "scale"}
    assert wanted <= set(arguments)
