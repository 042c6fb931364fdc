"""A random model that vLLM's CPU build runs in seconds, and what transformers says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.rollout.messages import Group, SamplerConfig, Sampling

VOCABULARY = 131
RANK = 4
SCALE = 0.7
LONGEST = 2048  # tokens of a sequence: long ones are still running when a starved test process has its turn
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def make_model(folder: Path, *, tied: bool = True) -> Path:
    """A Llama of two layers with grouped heads of 32, the smallest that vLLM's CPU attention takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def config(folder: Path, **changes: object) -> SamplerConfig:
    values: dict[str, object] = {
        "model_dir": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": LONGEST,
        "max_sequences": 16,
        "kv_cache_mb": 64,
        "gpu_memory_fraction": 0.5,
        "seed": 0,
        "tokenizer": False,
    }
    return SamplerConfig(**(values | changes))  # type: ignore[arg-type]


def factors(
    model: PreTrainedModel, seed: int, leaves: Sequence[str] = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
) -> Factors:
    """Random factors of some layers; k and gate stay untrained beside trained neighbours."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            0.2 * torch.randn(RANK, layer.in_features, generator=generator),
            0.2 * torch.randn(layer.out_features, RANK, generator=generator),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in leaves
    }


def merged(folder: Path, new: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> PreTrainedModel:
    """The model with W + s B A in place of W."""
    model = load(folder)
    with torch.no_grad():
        for name, (a, b) in new.items():
            layer = model.get_submodule(name)
            layer.weight = torch.nn.Parameter(layer.weight + SCALE * (b @ a))  # a tied head gets a weight of its own
    return model


@torch.no_grad()
def logprobs(model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Of every token but the first, by one plain forward of transformers."""
    tokens = torch.tensor(ids)
    logits = model(tokens[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].tolist()


def group(number: int, size: int, *, tokens: int = 24, prompt: int = 40, temperature: float = 1.0) -> Group:
    """A group with its own prompt and seeds."""
    ids = tuple((7 * number + 3 * i) % VOCABULARY for i in range(prompt))
    return Group(
        number, f"task-{number}", ids, tuple(range(100 * number, 100 * number + size)), Sampling(tokens, temperature)
    )
