"""Whether a long run grows: `python bench/soak.py --json OUT --steps 300`.

`rlvr run` with a tiny random model, real vLLM, real jails and a checkpoint every ten steps. After each step resident
memory, open descriptors and children of trainer and sampler are read from /proc, and what stands in /dev/shm. The
steps' last third is held against the first: medians of memory, the most of what is counted.

oneDNN keeps what it compiled for each shape of a product, 1024 of them unless ONEDNN_PRIMITIVE_CACHE_CAPACITY says
otherwise: as lengths vary, that fills for hundreds of steps and then stays. Here it is 16, so that a leak would show;
set the variable to look at another size.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Row, print_rows, publish, target  # noqa: E402
from tests.small import below, finish, lines_of, make_model, start, wait_for, write_recipe  # noqa: E402

CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
UNITS = {"resident": "MB", "descriptors": "", "children": "", "shared": "KB"}
GROWTH_MB, GROWTH_OTHER = 16.0, 2.0
"""Less than a tenth of a MB, and a hundredth of a descriptor, a step of 300."""


def main() -> None:
    """Run, look, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    os.environ.setdefault(CACHE, "16")
    with tempfile.TemporaryDirectory() as folder:
        seen = watch(Path(folder), steps)
    rows, targets = [], []
    for (who, metric), values in seen.items():
        third = len(values) // 3
        for part, some in (("first third", values[:third]), ("last third", values[-third:])):
            rows.append(Row(part, who, metric, UNITS[metric], min(some), median(some), max(some)))
        # A spare jail comes and goes with its descriptors, so counts have two levels: neither may rise.
        levels = [median] if metric == "resident" else [min, max]
        grown = max(level(values[-third:]) - level(values[:third]) for level in levels)
        limit = GROWTH_MB if metric == "resident" else GROWTH_OTHER
        targets += target(f"{who}: growth of {metric} {UNITS[metric]}".strip(), grown, limit, "lower")
    print_rows(rows)
    notes = [f"oneDNN keeps {os.environ[CACHE]} products"]
    notes += [f"{len(next(iter(seen.values())))} of {steps} steps were looked at, a line of metrics.jsonl each"]
    publish("soak", rows, targets, notes, parser.parse_args().json)


def watch(folder: Path, steps: int) -> dict[tuple[str, str], list[float]]:
    """What was seen after each step, by process and metric."""
    recipe = write_recipe(
        folder / "recipe.toml", make_model(folder / "model"), run_steps=steps, checkpoint_every=10, eval_every=50
    )
    out = folder / "run"
    run = start(recipe, out)
    seen: dict[tuple[str, str], list[float]] = {}
    looked = 0
    try:
        while looked < steps - 1:
            wait_for(run, partial(further, out, looked))
            looked = lines_of(out)
            children = below(run.pid)
            sampler = next(pid for pid, line in children.items() if "engine.rollout.worker" in line)
            for who, pid in (("trainer", run.pid), ("sampler", sampler)):
                seen.setdefault((who, "resident"), []).append(resident_mb(pid))
                seen.setdefault((who, "descriptors"), []).append(float(len(os.listdir(f"/proc/{pid}/fd"))))
            seen.setdefault(("trainer", "children"), []).append(float(len(children)))
            shared = sum(path.stat().st_size for path in Path("/dev/shm").iterdir() if path.is_file())
            seen.setdefault(("machine", "shared"), []).append(shared / 1024)
    finally:
        code, _, errors = finish(run, 120) if looked >= steps - 1 else (1, "", "")
        run.kill()
    if code:
        raise RuntimeError(f"the run ended with {code}: {errors}")
    return seen


def further(folder: Path, step: int) -> bool:
    """Whether a later step is done."""
    return lines_of(folder) > step


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
