"""The README.md beside an export: what it is, of which base, and how each program loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.types import LORA_SLOTS

PEFT = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "THIS_FOLDER")
```"""
VLLM = """```sh
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules trained=THIS_FOLDER
```
and ask for the model `trained`."""
SGLANG = """```sh
python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths trained=THIS_FOLDER \\
    --lora-target-modules all --max-lora-rank {rank}
```
with `"lora_path": "trained"` in each request."""
SPLIT = (
    " Where the base has fused Gated DeltaNet projections (`in_proj_qkv`), SGLang wants "
    "`rlvr export --format sglang` instead."
)
WHOLE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```
or `vllm serve THIS_FOLDER`."""
CHECK = "`rlvr check THIS_FOLDER` compares log-probs that vLLM serves with those of the trainer."


def card(info: Mapping[str, Any]) -> str:
    """The text, from the export's training_info.json."""
    form, base, rank = info["format"], str(info["base_model"]), info.get("rank")
    loadable = base.removeprefix("hf:").partition("@")[0] if base.startswith("hf:") else base
    facts = [
        f"* base model: `{base}` (sha256 {str(info['base_model_sha256'])[:12]})",
        f"* trained steps: {info['step']}",
        f"* rank: {rank}" if rank else "* every weight was trained",
        f"* format: {form}" + (f", {info['dtype']}" if "dtype" in info else f", layers under `{info.get('prefix')}`"),
    ]
    if form == "merged":
        what, ways = "A model", {"transformers and vLLM": WHOLE}
    elif form == "sglang":
        what, ways = "A LoRA adapter", {"SGLang": SGLANG}
    else:
        what, ways = "A LoRA adapter", {"PEFT": PEFT, "vLLM": VLLM, "SGLang": SGLANG + SPLIT}
        ways["To be sure"] = CHECK
    served = next((r for r in LORA_SLOTS if rank and r >= rank), rank)
    sections = [f"## {name}\n\n{text.format(base=loadable, rank=served)}" for name, text in ways.items()]
    head = f"---\nbase_model: {loadable}\nlibrary_name: {'transformers' if form == 'merged' else 'peft'}\n---"
    title = f"# {what} trained with rlvr, for {loadable}"
    return "\n\n".join([head, title, "\n".join(facts), *sections]) + "\n"
