"""Attention over packed segments that share their prefixes: exact, without padding and without a dense mask.

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]

where j runs over the chain of prefix segments of i's segment (all of their tokens) and over the tokens of i's
own segment up to and including i. Query head h reads key/value head `h // (heads / kv_heads)`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kernels.dispatch import UnsupportedError, pick
from kernels.layout import Layout


def segment_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Causal attention inside each segment, full attention to its chain of prefixes.

    q: `[tokens, heads, head_dim]`; k, v: `[tokens, kv_heads, head_dim]`, all of one dtype and device.
    scale: factor on the scores, default `head_dim ** -0.5`. impl: overrides the dispatch rule.
    Returns `[tokens, heads, head_dim]` in q's dtype; softmax statistics are fp32 or wider. Differentiable
    with respect to q, k and v. Under `cpu`, `triton` and `flash` a segment's output depends on the tokens of
    its own chain only, to the bit, as long as the layout stays the same.

    Raises ValueError when shapes, dtypes or devices do not fit together, UnsupportedError for an option that
    the implementation does not have.
    """
    _check(q, k, v, layout)
    name = pick("attention", q, impl, {"head_dim": q.shape[-1]})
    factor = float(scale) if scale is not None else q.shape[-1] ** -0.5
    if q.shape[0] == 0:
        return q + k.sum() + v.sum()  # no element, but connected to all three
    # Imported when first needed: Triton's module needs Triton.
    module = importlib.import_module(f"kernels.attention_{name}")
    out: torch.Tensor = module.attention(q, k, v, layout, factor)
    return out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> None:
    if q.dim() != 3 or k.dim() != 3 or v.shape != k.shape:
        raise ValueError(
            "segment_attention: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]; got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != layout.n_tokens or k.shape[0] != layout.n_tokens:
        raise ValueError(f"segment_attention: layout has {layout.n_tokens} tokens, q {q.shape[0]} and k {k.shape[0]}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"segment_attention: head_dim of q is {q.shape[2]}, of k {k.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"segment_attention: {q.shape[1]} heads are no multiple of {k.shape[1]} kv_heads")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError("segment_attention: q, k and v must share one dtype and one device")


def register_attention(name: str = "rlvr") -> None:
    """Make `segment_attention` an attention function of transformers, selected by
    `set_attn_implementation(name)`.

    The model is then called with batch dimension 1 as `model(ids, position_ids=layout.positions()[None],
    use_cache=False, layout=layout)`. Several batch rows are read as laid end to end: the layout then has all of
    their tokens. The function raises ValueError when the layout is missing or has another number of tokens, and
    for cached keys, and UnsupportedError for attention it does not do (sliding window,
    soft-cap, sinks, dropout, an attention mask).
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, _transformers_attention)


def _transformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: `[rows, heads, tokens, head_dim]` in, `[rows, tokens, heads, head_dim]` out."""
    if layout is None:
        raise ValueError("attention 'rlvr': call the model with layout=Layout(...)")
    if key.shape[2] != query.shape[2]:
        raise ValueError("attention 'rlvr': cached keys are not supported, call the model with use_cache=False")
    if attention_mask is not None:
        raise UnsupportedError("attention_mask: attention 'rlvr' takes its structure from layout, pass no mask")
    if dropout:
        raise UnsupportedError(f"dropout={dropout}: attention 'rlvr' has no dropout")
    for option in ("sliding_window", "softcap", "s_aux"):
        if options.get(option) is not None:
            raise UnsupportedError(f"{option}: attention 'rlvr' does not implement it")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise UnsupportedError("is_causal=False: attention 'rlvr' is causal")
    rows, heads, tokens, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return segment_attention(q, k, v, layout, scale=scaling).view(rows, tokens, heads, -1), None
