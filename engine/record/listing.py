"""`rlvr ls`: the runs below a folder, a line each."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.record.lock import LOCK


@dataclass(frozen=True, slots=True)
class Listed:
    """A run as a listing shows it."""

    name: str
    state: str
    """`running`, `ended`, or `stopped`: it neither runs nor has come to its end."""
    steps: int
    reward: float | None
    pass_rate: float | None
    """Of the newest step."""
    heldout: tuple[float, float] | None
    """The first suite's pass rate before and after."""


def list_runs(root: Path) -> list[Listed]:
    """Every run's folder directly below `root`, by name."""
    return [_listed(path.parent) for path in sorted(root.glob("*/recipe.toml"))]


def _listed(folder: Path) -> Listed:
    last, steps = _last_step(folder / "metrics.jsonl")
    summary = folder / "summary.json"
    heldout = json.loads(summary.read_text())["heldout"] if summary.exists() else None
    state = "running" if _is_locked(folder) else "ended" if summary.exists() else "stopped"
    return Listed(
        name=folder.name,
        state=state,
        steps=steps,
        reward=last.get("reward/mean"),
        pass_rate=last.get("pass_rate"),
        heldout=(heldout["before"], heldout["after"]) if heldout else None,
    )


def _last_step(path: Path) -> tuple[dict[str, Any], int]:
    """The last whole line, and how many there are."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return (json.loads(lines[-1]) if lines else {}), len(lines)


def _is_locked(folder: Path) -> bool:
    """Whether a run holds the folder's lock."""
    try:
        file = (folder / LOCK).open()
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
