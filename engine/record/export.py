"""What was trained, on disk: the adapter in PEFT's format, or the whole model in transformers'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedModel

from engine.recipe import Lora
from engine.snapshot import Snapshot
from engine.types import Factors

TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


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
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return _with_info(folder, snapshot, step, rank=lora.rank)


def export_model(folder: Path, model: PreTrainedModel, snapshot: Snapshot, step: int) -> Path:
    """Write a fully trained model, the base's tokenizer files and training_info.json into `folder`."""
    model.save_pretrained(folder)
    for file in snapshot.folder.iterdir():
        if file.name.startswith(TOKENIZER_FILES):
            shutil.copy(file, folder / file.name)
    return _with_info(folder, snapshot, step)


def _with_info(folder: Path, snapshot: Snapshot, step: int, **more: int) -> Path:
    info = {"base_model": snapshot.source, "base_model_sha256": snapshot.sha256, "step": step, **more}
    (folder / "training_info.json").write_text(json.dumps(info, indent=2) + "\n")
    return folder
