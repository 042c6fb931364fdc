"""The oracle of segment attention: one plain softmax per segment, differentiated by autograd."""

from __future__ import annotations

import torch

from kernels.layout import Layout


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """`segment_attention` in the inputs' own dtype; the softmax in fp32, or in float64 for float64 inputs."""
    group = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    for s in range(layout.n_segments):
        start, stop = layout.starts[s], layout.starts[s + 1]
        ranges = [*layout.prefix_ranges(s), (start, stop)]
        keys = torch.cat([k[a:b] for a, b in ranges]).repeat_interleave(group, dim=1)
        values = torch.cat([v[a:b] for a, b in ranges]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys).to(wide) * scale
        row = torch.arange(stop - start, device=q.device)[:, None] + keys.shape[0] - (stop - start)
        future = torch.arange(keys.shape[0], device=q.device)[None, :] > row
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights.to(q.dtype), values))
    return torch.cat(outputs)
