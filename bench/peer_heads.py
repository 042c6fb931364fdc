"""The head as other libraries compute it, each by its own function: log-probs, or Liger's whole loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

HEAD_PEERS = ("naive", "trl_selective", "trl_chunked", "cce_compile", "liger_grpo")

HeadFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of hidden `[tokens, width]`, weight `[vocab, width]` and targets `[tokens]`."""


def head_logprobs(impl: str, temperature: float) -> HeadFunction:
    """A peer's log-probs `[tokens]`. Raises ImportError where it is not installed, ValueError for a name it isn't."""
    if impl == "naive":
        return lambda h, w, t: ((h @ w.T).float() / temperature).log_softmax(-1).gather(1, t[:, None]).squeeze(1)
    if impl == "trl_selective":
        selective = importlib.import_module("trl.trainer.utils").selective_log_softmax
        return lambda h, w, t: selective((h @ w.T) / temperature, t)
    if impl == "trl_chunked":
        function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
        return lambda h, w, t: function.apply(h, w, None, t, temperature, 32768, None, 1.0, ())[0]
    if impl == "cce_compile":
        cce = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return lambda h, w, t: -cce(h / temperature, w, t, reduction="none", impl="torch_compile")
    raise ValueError(f"no head implementation {impl!r}")


def liger_loss(advantages: torch.Tensor, temperature: float) -> HeadFunction:
    """Liger's GRPO loss of sequences of equal length, advantages `[sequences]`; a scalar.

    Raises ImportError where Liger is not installed.
    """
    module = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    grpo = module.LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo", temperature=temperature
    )

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shape = (len(advantages), len(targets) // len(advantages))
        states, mask = hidden.view(*shape, -1), torch.ones(shape)
        value: torch.Tensor = grpo(states, weight, targets.view(shape), mask, advantages)[0]
        return value

    return loss
