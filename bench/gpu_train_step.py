"""A trainer step of a Qwen3-4B-shaped model on one GPU: `python bench/gpu_train_step.py --json OUT`.

The weights are random (speed and memory do not depend on them), bf16, LoRA r = 16 on the seven projections, 16,384
forward tokens in one micro-batch, the whole step: forward, loss, backward, clip, AdamW. `alone`: 8 sequences of 2,048
tokens that share nothing; `groups`: 8 prompts of 512 tokens with 8 completions of 192, each prompt standing once.
Memory is what tensors hold at the height, beside what `engine.train.memory` said before. Shares of the peak are of
989 TFLOP/s dense bf16 (NVIDIA's data sheet): `done` counts 4 operations a weight and token, which is what a step with
frozen weights does without recomputation, `quoted` counts 6, which is what others quote.

`--small` runs the same code on a tiny model, on a CPU too: a check of the script, no measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from engine import recipe_file
from engine.recipe import Recipe
from engine.train.policy import ATTENTION
from engine.train.step import Trainer
from engine.types import Completion, Graded
from kernels.attention import register_attention
from sandbox import Verdict

PEAK_TFLOPS = 989.0
PEER_TOKENS_PER_SECOND, PEER_GIB = 6230.0, 23.3  # a published figure for this shape on one H100
STEPS = 5
CASES = {"alone": (8, 1, 1024, 1025), "groups": (8, 8, 512, 193)}  # groups, members, prompt, completion


def config(small: bool) -> Qwen3Config:
    """Qwen3-4B's shape, or a tiny one."""
    if small:
        return Qwen3Config(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
        )  # fmt: skip
    return Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip


def recipe(device: str, checkpointing: bool) -> Recipe:
    """The step's settings; what a trainer does not read is as short as the types allow."""
    return recipe_file.parse(
        {
            "run": {"name": "gpu-train-step", "steps": 100},
            "model": {"source": "random", "dtype": "bfloat16"},
            "lora": {"rank": 16, "alpha": 32.0},
            "tasks": {"train": "generated:train"},
            "rollout": {"max_tokens": 2048},
            "train": {"device": device, "token_budget": 16_384, "checkpointing": checkpointing},
        }
    )


def sampled(case: str, vocab: int) -> list[list[Graded]]:
    """Groups of random completions; every other one passes."""
    generator = torch.Generator().manual_seed(0)
    groups, members, prompt, length = CASES[case]

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

    made = []
    for g in range(groups):
        prompt_ids = ids(prompt)
        made.append(
            [
                Graded(
                    Completion("t", g, m, prompt_ids, ids(length), (-2.0,) * length, "stop", 0, ""),
                    "",
                    Verdict("AC" if (g + m) % 2 else "WA", 0, 1),
                    float((g + m) % 2),
                )
                for m in range(members)
            ]
        )
    return made


def measure(case: str, checkpointing: bool, device: str, small: bool) -> dict[str, float]:
    """Medians of a few steps after two that warm up."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(small), dtype=torch.bfloat16, attn_implementation=ATTENTION)
    trainer = Trainer(recipe(device, checkpointing), model)
    trainer.require_room()
    data = sampled(case, model.config.vocab_size)
    advantages = [[1.0 if item.reward else -1.0 for item in group] for group in data]
    seconds = []
    for step in range(1, STEPS + 3):
        start = time.perf_counter()
        stats = trainer.step(data, advantages, step)  # its statistics wait for the device
        seconds.append(time.perf_counter() - start)
    weights = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    took = median(seconds[2:])
    return {
        "seconds": took,
        "tokens_per_second": stats.forward_tokens / took,
        "done_of_peak": 4 * weights * stats.forward_tokens / took / PEAK_TFLOPS / 1e12,
        "quoted_of_peak": 6 * weights * stats.forward_tokens / took / PEAK_TFLOPS / 1e12,
        "memory_gib": stats.memory_peak_mb / 1024,
        "predicted_gib": stats.memory_predicted_mb / 1024,
        "forward_tokens": stats.forward_tokens,
        "grad_norm": stats.grad_norm,
    }


UNITS = {
    "seconds": "s", "tokens_per_second": "tokens/s", "done_of_peak": "fraction", "quoted_of_peak": "fraction",
    "memory_gib": "GiB", "predicted_gib": "GiB", "forward_tokens": "tokens", "grad_norm": "",
}  # fmt: skip


def limits_of(found: dict[tuple[str, bool], dict[str, float]]) -> list[tuple[str, float, float, str]]:
    """Name, figure, limit and which way is better."""
    alone, less = found["alone", False], found["alone", True]
    speed = max(alone["tokens_per_second"], less["tokens_per_second"])
    error = max(abs(figures["predicted_gib"] / figures["memory_gib"] - 1) for figures in found.values())
    return [
        ("tokens a second, sequences that share nothing", speed, PEER_TOKENS_PER_SECOND, "higher"),
        ("GiB with checkpointing", less["memory_gib"], PEER_GIB, "lower"),
        ("largest error of the predicted memory", error, 0.15, "lower"),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--small", action="store_true", help="a tiny model, to check this script")
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.small:
        raise SystemExit("bench/gpu_train_step.py needs a CUDA GPU; --small checks the script without one")
    register_attention(ATTENTION)
    rows: list[dict[str, Any]] = []
    found: dict[tuple[str, bool], dict[str, float]] = {}
    for case in CASES:
        for checkpointing in (False, True):
            if device != "cpu":
                torch.cuda.empty_cache()
            figures = found[case, checkpointing] = measure(case, checkpointing, device, arguments.small)
            name = f"{case}, checkpointing" if checkpointing else case
            print(f"{name:24s} " + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
            rows += [
                {"case": name, "impl": "ours", "metric": k, "unit": UNITS[k], "min": v, "median": v, "max": v}
                for k, v in figures.items()
            ]
    limits = [] if arguments.small else limits_of(found)
    targets = [
        {"name": n, "value": v, "limit": limit, "better": b, "ok": v >= limit if b == "higher" else v <= limit}
        for n, v, limit, b in limits
    ]
    for target in targets:
        print(f"{'ok  ' if target['ok'] else 'MISS'} {target['name']}: {target['value']:.4g}, limit {target['limit']}")
    result = {
        "script": "bench/gpu_train_step.py",
        "machine": {"device": torch.cuda.get_device_name() if device != "cpu" else "cpu"},
        "versions": {"torch": torch.__version__},
        "rows": rows,
        "targets": targets,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
