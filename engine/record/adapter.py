"""An adapter's folder in PEFT's format, read back."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from engine.errors import InputError
from engine.types import Factors

PREFIX = "base_model.model."


def read_adapter(folder: Path) -> tuple[Factors, float]:
    """The factors by module name, and what B A is multiplied by.

    Raises InputError for missing files, and for tensors that are no pairs of A and B of one rank.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise InputError(
            f"{folder}: no adapter in PEFT's format: {Path(str(error.filename)).name} is missing"
        ) from None
    except Exception as error:  # safetensors and json raise kinds of their own for a damaged file
        raise InputError(f"{folder}: its adapter can't be read: {error}") from None
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    names = sorted({key.removeprefix(PREFIX).partition(".lora_")[0] for key in tensors})
    factors = {}
    for name in names:
        a, b = (tensors.get(f"{PREFIX}{name}.lora_{which}.weight") for which in "AB")
        if a is None or b is None or a.shape[0] != rank or b.shape[1] != rank:
            raise InputError(f"{folder}: {name} has no pair of factors of rank {rank}")
        factors[name] = (a.float(), b.float())
    return factors, alpha / (rank**0.5 if config.get("use_rslora") else rank)
