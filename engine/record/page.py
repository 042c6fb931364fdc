"""`rlvr report`: a run as one HTML file that opens from disk: curves, tasks, and a browser of rollouts."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.errors import InputError

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/*data*/"
MOST_COMPLETIONS = 2000
"""That a page holds unless more are asked for; a browser takes some ten thousand."""


def write_page(run: Path, out: Path | None, completions: int = MOST_COMPLETIONS) -> Path:
    """Write the page of a run, RUN/report.html if `out` is None; its path.

    completions: at most about so many rollouts, whole groups of steps spread evenly over the run.
    Raises InputError for a folder that is no run.
    """
    data = collect(run, completions)
    # No text of a model may end the script that it stands in.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    path = out or run / "report.html"
    before, after = TEMPLATE.read_text(encoding="utf-8").split(PLACE)
    path.write_text(before + text + after, encoding="utf-8")
    return path


def collect(run: Path, completions: int) -> dict[str, Any]:
    """What the page shows. Raises InputError for a folder that is no run."""
    if not (run / "metrics.jsonl").is_file():
        raise InputError(f"{run}: no run is there (it has no metrics.jsonl)")
    metrics = list(_metrics(run / "metrics.jsonl"))
    steps = sorted((run / "rollouts").glob("step-*.jsonl.gz"))
    if not metrics or not steps:
        raise InputError(f"{run}: the run has no step yet")
    names = list(dict.fromkeys(name for row in metrics for name in row if name != "step"))
    groups, tasks, size = [], _Tasks(len(steps)), 0
    shown = _spread(len(steps), max(1, completions // max(1, _count(steps[0]))))
    for index, path in enumerate(steps):
        for rows in _groups(path):
            tasks.add(index, rows)
            size += len(rows)
            if index in shown:
                groups.append(_group(int(path.name[5:11]), rows))
    return {
        "name": run.resolve().name,
        "manifest": _json(run / "manifest.json"),
        "summary": _json(run / "summary.json"),
        "steps": [row["step"] for row in metrics],
        "metrics": {name: [_finite(row.get(name)) for row in metrics] for name in names},
        "tasks": tasks.rows(),
        "groups": groups,
        "completions": {"shown": sum(len(g["members"]) for g in groups), "all": size},
    }


class _Tasks:
    """Each training task's attempts, in the first and the second half of the run."""

    def __init__(self, steps: int) -> None:
        self._half = steps / 2
        self._seen: dict[str, dict[str, Any]] = {}

    def add(self, index: int, rows: list[dict[str, Any]]) -> None:
        entry = self._seen.setdefault(
            rows[0]["task"], {"source": rows[0]["source"], "rewards": [], "halves": ([], []), "infra": 0}
        )
        for row in rows:
            if row["reward"] is None:
                entry["infra"] += 1
                continue
            entry["rewards"].append(row["reward"])
            entry["halves"][index >= self._half].append(float(row["verdict"] == "AC"))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "task": task,
                "source": entry["source"],
                "attempts": len(entry["rewards"]) + entry["infra"],
                "reward": _mean(entry["rewards"]),
                "first": _mean(entry["halves"][0]),
                "second": _mean(entry["halves"][1]),
            }
            for task, entry in sorted(self._seen.items())
        ]


def _group(step: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    prompt = first["prompt"]
    said = prompt if isinstance(prompt, str) else "\n\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    keys = (
        "member", "completion", "program", "verdict", "passed", "total", "detail", "reward", "parts", "advantage",
        "finish", "version", "boundaries", "logprob", "trained",
    )  # fmt: skip
    members = [{key: row.get(key) for key in keys} | {"tokens": len(row["token_ids"])} for row in rows]
    return {"step": step, "task": first["task"], "source": first["source"], "prompt": said, "members": members}


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The steps' lines; the last one may be half written while a run goes on."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _groups(path: Path) -> Iterator[list[dict[str, Any]]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for _, members in groupby(rows, key=lambda row: row["group"]):
        yield list(members)


def _count(path: Path) -> int:
    return sum(len(rows) for rows in _groups(path))


def _spread(of: int, most: int) -> set[int]:
    """At most `most` of the numbers below `of`, first and last among them."""
    if most >= of:
        return set(range(of))
    if most == 1:
        return {of - 1}
    return {round(i * (of - 1) / (most - 1)) for i in range(most)}


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
