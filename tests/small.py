"""A whole run in half a minute: a tiny random model with a tokenizer, real vLLM, real jails, generated tasks."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ANSWERS = ("a)", "b)", "a+b)", "a-b)", "b-a)", "a*b)", "max(a,b))", "a%2)")
"""Tokens of their own, which the model prefers: so that a random policy now and then answers right."""


def make_model(folder: Path) -> Path:
    """A Llama that says one of ANSWERS most of the time, with a tokenizer of single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<end>", "\n", *map(chr, range(32, 127)), *ANSWERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.1,
        eos_token_id=1, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # One direction in every state, which the answers' logits look at, and another after an answer, for the line's end.
    tokens, head, first = model.model.embed_tokens.weight, model.lm_head.weight, len(words) - len(ANSWERS)
    with torch.no_grad():
        tokens[:, :2] = torch.tensor([1.0, 0.0])
        tokens[first:, :2] = torch.tensor([0.0, 1.0])
        head[:, :2] = -0.5
        head[first:, 0] = 0.7
        head[words.index("\n"), 1] = 2.0
    model.save_pretrained(folder)
    return folder


def write_recipe(path: Path, model: Path, **values: object) -> Path:
    """A recipe of a small run; `values` are further keys, such as run_steps=8."""
    sections: dict[str, dict[str, object]] = {
        "run": {"name": "small", "seed": 3, "steps": 6},
        "model": {"source": str(model)},
        "lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "up_proj"]},
        "tasks": {"train": "generated:train", "heldout": {"heldout": "generated:heldout-families"}},
        "rollout": {
            "group_size": 4, "prompts_per_step": 4, "max_tokens": 2, "max_prompt_tokens": 1500, "stop": ["\n"],
            "kv_cache_mb": 64,
        },
        "sandbox": {"require": []},
        "reward": {"passed": 0.5, "share": 0.5},
        "optim": {"lr": 5e-3},
        "checkpoint": {"every": 2, "keep": 2},
        "eval": {"samples": 1, "every": 3, "bootstrap": 100},
    }  # fmt: skip
    for name, value in values.items():
        section, _, key = name.partition("_")
        sections.setdefault(section, {})[key] = value
    lines = []
    for section, table in sections.items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--standalone", "--no-python")
"""Before `rlvr run`: two trainers."""


def heed_ctrl_c() -> None:
    """A shell starts its background jobs with SIGINT ignored, and this test run may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(
    recipe: Path, output: Path, *options: str, prefix: tuple[str, ...] = (), python_path: Path | None = None
) -> subprocess.Popen[str]:
    """`rlvr run` in a process of its own, in the recipe's folder; `python_path` holds modules that go first."""
    return subprocess.Popen(
        [*prefix, str(Path(sys.executable).parent / "rlvr"), "run", str(recipe), "--output", str(output), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=recipe.parent, start_new_session=True,
        preexec_fn=heed_ctrl_c,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, (python_path, ROOT))))},
    )  # fmt: skip


def finish(run: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Exit code, output and errors of a run that ends by itself."""
    try:
        out, errors = run.communicate(timeout=seconds)
    finally:
        run.kill()
    return run.returncode, out, errors


def wait_for(run: subprocess.Popen[str], seen: Callable[[], bool], seconds: float = 240) -> None:
    """Until something is so, while the run goes on."""
    deadline = time.monotonic() + seconds
    while not seen():
        assert run.poll() is None, f"the run ended before: {run.communicate()}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def lines_of(folder: Path) -> int:
    """Steps in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def facts(folder: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on how often it was killed."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("seconds", "tokens_per_second", "adapter"):
        del summary[name]
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in metrics],
        "rollouts": {
            path.name: hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()
            for path in sorted((folder / "rollouts").iterdir())
        },
        "adapter": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "adapter").iterdir())
        },
        "summary": summary,
    }


def below(ancestor: int) -> dict[int, str]:
    """The living descendants of a process: pid and command line."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if fields[0] != "Z":
                parents[int(folder.name)], lines[int(folder.name)] = int(fields[1]), line
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    found: dict[int, str] = {}
    todo = [ancestor]
    while todo:
        parent = todo.pop()
        children = [pid for pid, of in parents.items() if of == parent]
        found |= {pid: lines[pid] for pid in children}
        todo += children
    return found


def alive(pids: Mapping[int, str]) -> dict[int, str]:
    """Those that have not ended."""
    out = {}
    for pid, line in pids.items():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            out[pid] = line
    return out


def gone(pids: Mapping[int, str], seconds: float = 20) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
