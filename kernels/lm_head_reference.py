"""The oracle of the head: whole logits, plain PyTorch, differentiated by autograd; softmax in fp32 or wider."""

from __future__ import annotations

import torch

from kernels.lm_head import HeadOptions, LossOfRows


def workspace_bytes(rows: int, weight: torch.Tensor) -> int:
    """Whole logits: the product, its softmax, their gradients, in fp32 or wider."""
    return 4 * rows * weight.shape[0] * max(weight.element_size(), 4)


def logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    targets: torch.Tensor,
    valid: torch.Tensor | None,
    options: HeadOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.lm_head.token_logprobs`; matrix products in hidden's dtype, the rest in fp32 or float64."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = torch.arange(hidden.shape[0], device=hidden.device) if valid is None else valid.nonzero().flatten()
    x = hidden if valid is None else hidden[rows]
    raw = (x @ weight.T).to(wide)
    if a is not None and b is not None:
        raw = raw + options.lora_scale * ((x.to(wide) @ a.to(wide).T) @ b.to(wide).T)
    if options.softcap is not None:
        raw = options.softcap * torch.tanh(raw / options.softcap)
    logp = torch.log_softmax(raw / options.temperature, dim=-1)
    logprob = logp.gather(1, targets[rows, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    if valid is None:
        return logprob, entropy
    zeros = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
    return zeros.index_put((rows,), logprob), zeros.index_put((rows,), entropy)


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
    """See `kernels.lm_head.token_loss`: the objective on all valid rows at once, through autograd."""
    logprob, entropy = logprobs(hidden, weight, a, b, targets, valid, options)
    rows = slice(0, hidden.shape[0]) if valid is None else valid.nonzero().flatten()
    value = loss_of_rows(logprob[rows], entropy[rows], rows) if logprob[rows].numel() else logprob.sum() * 0
    return value, logprob.detach(), entropy.detach()
