"""What the comparisons share: a measurement in a process of its own, its rows, its targets and the result's file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.imports import TURNS, WAITING
from kernels.dispatch import cpu_has_fast_bf16

PEERS = ("torch", "transformers", "trl", "peft", "liger-kernel", "cut-cross-entropy")
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    case: str
    impl: str
    metric: str
    unit: str
    min: float
    median: float
    max: float


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach."""

    name: str
    value: float
    limit: float
    better: str
    ok: bool


def resident(field: str) -> float:
    """MB from /proc/self/status: VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def in_a_process(script: Path, arguments: Sequence[str], *, threads: int, limit: float) -> Answer | str:
    """What `script` prints as its last line, JSON, in a fresh interpreter; or in one line why there is nothing."""
    environment = os.environ | WAITING | TURNS
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(script), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"more than {limit:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    answer: Answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def rows_of(case: str, impl: str, units: Mapping[str, str], answers: Sequence[Answer]) -> list[Row]:
    """A row for each metric that `units` names and the answers have."""
    rows = []
    for metric, unit in units.items():
        values = [float(answer[metric]) for answer in answers if answer.get(metric) is not None]
        if values:
            rows.append(Row(case, impl, metric, unit, min(values), median(values), max(values)))
    return rows


def least(rows: Sequence[Row], case: str, impl: str, metric: str) -> float | None:
    """The least of a metric: on a shared machine the best run is the least disturbed one."""
    found = [r.min for r in rows if (r.case, r.impl, r.metric) == (case, impl, metric)]
    return found[0] if found else None


def target(name: str, value: float | None, limit: float, better: str) -> list[Target]:
    """A target as a list of one, of none where a side was not measured."""
    if value is None:
        return []
    ok = value <= limit if better == "lower" else value >= limit
    return [Target(name, float(f"{value:.4g}"), limit, better, ok)]


def ratio(over: float | None, under: float | None) -> float | None:
    """`over / under` where both were measured."""
    return over / under if over is not None and under else None


def print_rows(rows: Sequence[Row]) -> None:
    """The table."""
    for row in rows:
        spread = f"{row.min:12.5g} {row.median:12.5g} {row.max:12.5g} {row.unit}"
        print(f"{row.case:<22} {row.impl:<22} {row.metric:<16} {spread}", flush=True)


def publish(
    script: str, rows: Sequence[Row], targets: Sequence[Target], notes: Sequence[str], out: Path | None
) -> None:
    """Print the targets and write everything where asked; `notes` say what was chosen and what was not measured."""
    print()
    for note in notes:
        print(f"note {note}")
    for goal in targets:
        side = "at most" if goal.better == "lower" else "at least"
        print(f"{'ok  ' if goal.ok else 'MISS'} {goal.name}: {goal.value:.4g} ({side} {goal.limit:.4g})")
    if out is None:
        return
    result = {
        "script": script,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "bf16_products": cpu_has_fast_bf16(),
            "load": os.getloadavg()[0],
        },
        "versions": {name: version(name) for name in PEERS},
        "notes": list(notes),
        "rows": [asdict(row) for row in rows],
        "targets": [asdict(goal) for goal in targets],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def version(name: str) -> str:
    """Of an installed package; a missing peer is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
