"""Tiny random models of every kind that is exported, an adapter on each, and what transformers computes of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.recipe import Lora
from engine.record.export import export_adapter
from engine.snapshot import Snapshot, hash_folder
from tests.rollout.tiny import RANK, SCALE, Factors, factors, load, merged

IDS = torch.arange(3, 43)[None]
DENSE = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")
HYBRID = (*DENSE, "in_proj_qkv", "in_proj_z", "out_proj")
SMALL = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "head_dim": 8,
}  # fmt: skip
DELTANET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
KINDS = ("llama-tied", "llama", "qwen3", "hybrid", "wrapper")


@dataclass(frozen=True, slots=True)
class Made:
    """A base, a run's folder with an adapter of step 7, and the factors in it."""

    base: Path
    run: Path
    factors: Factors
    trained: torch.Tensor
    """Logits with the adapter, by plain merged weights in fp32."""
    plain: torch.Tensor


def make_base(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a random model of `kind`."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3_5Config,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5TextConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(0)
    common = {**SMALL, "tie_word_embeddings": kind == "llama-tied", "initializer_range": 0.05}
    model: PreTrainedModel
    match kind:
        case "llama" | "llama-tied":
            model = LlamaForCausalLM(LlamaConfig(**common))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**common))
        case "hybrid":
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **DELTANET))
        case _:
            wrapped = Qwen3_5Config(text_config={**common, **DELTANET}, vision_config=VISION, tie_word_embeddings=False)
            model = Qwen3_5ForConditionalGeneration(wrapped)
    model.save_pretrained(folder, **changes)
    return folder


def make(kind: str, folder: Path, leaves: Sequence[str] = (), **changes: Any) -> Made:
    """A base of `kind` and a run that trained the layers that end on `leaves`."""
    base = make_base(kind, folder / "base", **changes)
    model = load(base)
    new = factors(model, 1, leaves or (DENSE if kind in ("llama-tied", "llama", "qwen3") else HYBRID))
    save(folder / "run" / "adapter", new, base)
    return Made(base, folder / "run", new, logits(merged(base, new)), logits(model))


def save(folder: Path, new: Factors, base: Path, *, step: int = 7) -> Path:
    """Write an adapter as a run does."""
    lora = Lora(rank=RANK, alpha=SCALE * RANK)
    return export_adapter(folder, new, lora, Snapshot(str(base), base, hash_folder(base)), step)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def load_any(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
