"""The adapter in PEFT's format, which PEFT and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from engine.recipe import Lora
from engine.snapshot import Snapshot
from engine.types import Factors


def export_adapter(folder: Path, factors: Factors, lora: Lora, snapshot: Snapshot, step: int) -> Path:
    """Write adapter_model.safetensors (fp32), adapter_config.json and training_info.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": snapshot.source,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in factors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    info = {
        "base_model": snapshot.source,
        "base_model_sha256": snapshot.sha256,
        "step": step,
        "rank": lora.rank,
    }
    for name, content in (("adapter_config.json", config), ("training_info.json", info)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return folder
