"""The model that is trained: frozen transformers weights, LoRA beside them, packed segments through our attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from engine.train.lora import Adapter, add_lora, match_targets
from kernels.attention import register_attention
from kernels.layout import Layout
from kernels.lm_head import token_logprobs

ATTENTION = "rlvr"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """A causal language model with an adapter, and its forward over packed segments."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        device: str,
        targets: Sequence[str],
        rank: int,
        scale: float,
        seed: int,
    ) -> None:
        register_attention(ATTENTION)
        self.model = _load(model_dir, dtype).to(device)
        self.model.eval()
        self.adapter: Adapter = add_lora(self.model, targets, rank=rank, scale=scale, seed=seed)
        self.device = torch.device(device)

    @property
    def head(self) -> torch.Tensor:
        """The output projection `[vocab, hidden]`; the embedding where the two are tied."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def hidden(self, input_ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Last hidden states `[tokens, hidden]` of packed segments `[tokens]`."""
        decoder: nn.Module = self.model.model
        out = decoder(
            input_ids=input_ids[None],
            position_ids=layout.positions().to(self.device)[None],
            use_cache=False,
            layout=layout,
        )
        state: torch.Tensor = out.last_hidden_state
        return state[0]

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-prob of every token but the first, at temperature 1."""
        ids = torch.tensor(token_ids, device=self.device)
        state = self.hidden(ids[:-1], Layout((0, len(token_ids) - 1), (-1,)))
        logprobs, _ = token_logprobs(state, self.head, ids[1:])
        return tuple(logprobs.tolist())


def _load(model_dir: Path, dtype: str) -> Any:
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=DTYPES[dtype], attn_implementation=ATTENTION, local_files_only=True
    )


def check_targets(model_dir: Path, targets: Sequence[str]) -> int:
    """How many layers the targets name, from the model's configuration alone, no weight is loaded.

    Raises LookupError for a target that matches none.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir, local_files_only=True))
    return len(match_targets(model, targets))
