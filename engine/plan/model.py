"""A model's size from its config.json alone, or from its name; nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InputError
from engine.recipe import Recipe
from engine.snapshot import config_here

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
NAMED_KV_NUMBERS = 36 * 2 * 8 * 128
"""Of a token, where only the model's name is known: 36 layers with 8 key and value heads of 128, as dense models of 4
to 8 billion parameters have them. Hybrid ones have fewer."""
LORA_SHARE_OF_A_RANK = 5e-4
"""Adapter parameters a rank and model parameter: rank * (in + out) of all projections over in * out, at widths of 2,500
to 5,000. It decides what a sync and an exchange of gradients carry, which are small parts of a step."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the times of a step depend on."""

    parameters: float
    """All of them, embeddings too."""
    read: float
    """Those that an engine step reads: all but the input embeddings, also where experts take turns, for with some tens
    of sequences each expert has a token."""
    active: float
    """Those that a token is multiplied with; fewer than `read` where experts take turns."""
    kv_numbers: float
    """Keys and values that a token adds, over all layers with attention."""
    trained: float
    """Adapter parameters, or all."""
    source: str
    """Where this is from, for a person."""


def model_size(recipe: Recipe) -> ModelSize:
    """The recipe's model, from the config.json that is on this machine, else from a size such as `4b` in its name.

    Raises InputError where neither is there.
    """
    source = recipe.model.source
    folder = config_here(source)
    if folder is not None:
        config = json.loads((folder / "config.json").read_text())
        parameters, read, active, kv = _counted(config.get("text_config", config))
        said = "its config.json"
    else:
        parameters = read = active = _named(source)
        kv = NAMED_KV_NUMBERS
        said = (
            f"the {parameters / 1e9:g}B in its name, for its config.json is not here; "
            f"{2 * kv / 1024:.0f} KiB of keys and values a token in bf16 are assumed"
        )
    lora = recipe.lora
    trained = parameters if lora is None else parameters * LORA_SHARE_OF_A_RANK * lora.rank
    return ModelSize(parameters, read, active, kv, trained, said)


def _named(source: str) -> float:
    found = _SIZE.findall(source.partition("@")[0])
    if not found:
        raise InputError(
            f"model.source = {source!r}: no config.json of it is on this machine and its name has no size such as 4b, "
            f"so nothing can be planned; fetch it once with rlvr run --dry-run, or name a local folder"
        )
    number, unit = found[-1]
    return float(number) * (1e9 if unit.lower() == "b" else 1e6)


def _counted(config: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Of a decoder's configuration: parameters, those read, those active, and the keys' and values' numbers a token.

    Norms and biases, some parts in ten thousand, are left out.
    """
    try:
        hidden, layers, vocabulary = (config[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
        heads = config["num_attention_heads"]
    except KeyError as error:
        raise InputError(f"the model's config.json has no {error}: its size can't be planned from it") from None
    size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    gate = 2 if config.get("attn_output_gate") else 1
    attention = hidden * size * ((1 + gate) * heads + 2 * kv_heads)
    kinds = config.get("layer_types") or _kinds(config, layers)
    linear = sum(kind == "linear_attention" for kind in kinds)
    mixed, one = _mlp(config, hidden)
    embeddings = hidden * vocabulary
    rest = (layers - linear) * attention + linear * _linear_attention(config, hidden)
    tied = config.get("tie_word_embeddings", True)
    return (
        rest + layers * mixed + embeddings * (1 if tied else 2),
        rest + layers * mixed + embeddings,
        rest + layers * one + embeddings,
        2.0 * (layers - linear) * kv_heads * size,
    )


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    every = config.get("full_attention_interval")
    if not every or "linear_num_value_heads" not in config:
        return ["full_attention"] * layers
    return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]


def _linear_attention(config: Mapping[str, Any], hidden: int) -> float:
    """Of a gated delta layer: projections to queries, keys, values and gate, and back."""
    if "linear_num_value_heads" not in config:
        return 0.0
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return float(hidden * (2 * keys + 3 * values))


def _mlp(config: Mapping[str, Any], hidden: int) -> tuple[float, float]:
    """Of a layer: all of it, and what one token passes."""
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    if not experts:
        own = 3.0 * hidden * config["intermediate_size"]
        return own, own
    each = 3.0 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = 3.0 * hidden * (config.get("shared_expert_intermediate_size") or 0)
    return experts * each + shared, config["num_experts_per_tok"] * each + shared
