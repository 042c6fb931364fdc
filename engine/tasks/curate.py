"""What `rlvr tasks show`, `gold` and `split` do: from a source to lines to print, files and a manifest beside them."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.tasks.duplicates import cluster
from engine.tasks.filters import SHARED_WORDS, decontaminate, short_enough
from engine.tasks.gold import Gold, Progress, gold_filter
from engine.tasks.own import row_of, write_own
from engine.tasks.sources import Loaded, load_tasks, read_tasks
from engine.tasks.split import TRAIN, split
from engine.types import Task
from sandbox import AssertTests, Limits, Pool, StdinTests

SHOWN = 2000  # characters of a prompt or a reference
SHOWN_CASES = 3
REASONS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class GoldSummary:
    """What a source came to under the gold filter."""

    rows: int
    tasks: int
    kept: int
    soft: int
    rejected: Mapping[str, int]
    """Rows that gave no task, by reason."""
    dropped: Mapping[str, int]
    """Tasks whose reference did not pass, by reason."""

    def lines(self) -> list[str]:
        """For people; the last line has the count."""
        found = [f"{count:7d} rows rejected: {reason}" for reason, count in self.rejected.items()]
        found += [f"{count:7d} tasks dropped: {reason}" for reason, count in self.dropped.items()]
        if self.soft:
            found.append(f"{self.soft:7d} tasks kept whose tests share an interpreter with the program (soft)")
        return [*found, f"gold: {self.kept} of {self.tasks} references pass every case twice"]


def show_lines(source: str, count: int = 1) -> list[str]:
    """A source in words: how many tasks, of what kinds and sources, what was rejected and why, and the first tasks.

    Raises InputError.
    """
    loaded = read_tasks(source)
    tasks = loaded.tasks
    lines = [f"{source}: {len(tasks)} tasks, {len(loaded.rejected)} rows rejected"]
    lines += [f"{number:7d} {name}" for name, number in collections.Counter(t.source for t in tasks).most_common(30)]
    kinds: dict[str, list[int]] = collections.defaultdict(list)
    for task in tasks:
        kinds[type(task.tests).__name__].append(_cases(task))
    for kind, sizes in sorted(kinds.items()):
        cases = f", {min(sizes)} to {max(sizes)} cases, median {statistics.median(sizes):g}" if any(sizes) else ""
        lines.append(f"{len(sizes):7d} {kind}{cases}")
    lines.append(f"{sum(task.reference is not None for task in tasks):7d} with a reference")
    for reason, number in list(loaded.reasons.items())[:REASONS_SHOWN]:
        example = next(row for row in loaded.rejected if row.reason == reason)
        detail = f": {example.detail}" if example.detail else ""
        lines.append(f"{number:7d} rejected: {reason} (first: {example.row}{detail})")
    for task in tasks[:count]:
        lines += _described(task)
    return lines


def gold_file(
    source: str,
    out: Path | None,
    *,
    jobs: int | None = None,
    limits: Limits | None = None,
    numpy: bool = False,
    require: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> GoldSummary:
    """Run the gold filter over a source; with `out`, write the kept tasks there as our own rows.

    Beside `out` stands OUT.manifest.json, and until the filter is through OUT.journal.jsonl, from which it goes on.
    jobs: programs at once; None takes every core. Raises InputError, SandboxError and OSError.
    """
    started = time.monotonic()
    allowed = limits or Limits()
    loaded = read_tasks(source)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    pool = Pool(jobs or len(os.sched_getaffinity(0)), numpy=numpy, require=require)
    journal = None if out is None else out.with_name(f"{out.name}.journal.jsonl")
    gold = gold_filter(loaded.tasks, pool, allowed, journal=journal, progress=progress)
    summary = GoldSummary(
        rows=len(loaded.tasks) + len(loaded.rejected),
        tasks=len(loaded.tasks),
        kept=len(gold.kept),
        soft=sum(said.soft and not said.reason for said in gold.judged),
        rejected=loaded.reasons,
        dropped=dict(collections.Counter(said.reason for said in gold.judged if said.reason).most_common()),
    )
    if out is not None and journal is not None:
        write_own(out, gold.kept)
        manifest = _gold_manifest(loaded, gold, summary, allowed) | {
            "file": {"name": out.name, "sha256": _sha256(out)},
            "numpy": numpy,
            "seconds": round(time.monotonic() - started, 1),
        }
        _write_json(out.with_name(f"{out.name}.manifest.json"), manifest)
        journal.unlink(missing_ok=True)
    return summary


def split_file(
    source: str,
    out: Path,
    heldout: Mapping[str, int],
    *,
    train: int | None = None,
    seed: int = 0,
    threshold: float = 0.7,
    against: Sequence[str] = (),
    shared_words: int = SHARED_WORDS,
    count_tokens: Callable[[Task], int] | None = None,
    max_tokens: int = 0,
) -> list[str]:
    """Cut a source into files OUT/<part>.jsonl and OUT/split_manifest.json; lines that say what came out.

    First too long prompts go, then what shares words with the suites `against`, then near-duplicates.
    Raises InputError and OSError; a folder that already holds a split is never written to.
    """
    manifest_path = out / "split_manifest.json"
    if manifest_path.exists():
        raise InputError(f"{out} already holds a split; delete it or write elsewhere")
    if not 0 < threshold <= 1:
        raise InputError(f"threshold {threshold}: it must be above 0 and at most 1")
    everything = load_tasks(source)
    suites = {name: load_tasks(name) for name in against}
    short, long = short_enough(everything, count_tokens, max_tokens) if count_tokens is not None else (everything, [])
    clean, contaminated = decontaminate(short, suites, shared_words)
    if not clean:
        raise InputError(
            f"{source}: nothing is left: {len(long)} too long, {len(contaminated)} share words with a suite"
        )
    done = split(clean, cluster(clean, threshold), heldout, seed=seed, train=train)
    out.mkdir(parents=True, exist_ok=True)
    manifest = {
        "source": source,
        "tasks": len(everything),
        "seed": seed,
        "threshold": threshold,
        "parts": {name: _written(out / f"{name}.jsonl", part) for name, part in done.parts.items()},
        "near_duplicates": [dataclasses.asdict(pair) for pair in done.duplicates],
        "contaminated": [dataclasses.asdict(hit) for hit in contaminated],
        "against": list(against),
        "shared_words": shared_words,
        "too_long": [{"id": name, "tokens": tokens} for name, tokens in long],
        "max_tokens": max_tokens,
        "not_chosen": done.not_chosen,
    }
    _write_json(manifest_path, manifest)
    near = collections.Counter(pair.part for pair in done.duplicates)
    counts = {
        f"prompts longer than {max_tokens} tokens": len(long),
        f"share {shared_words} words in a row with {', '.join(against)}": len(contaminated),
        **{f"near-duplicates of tasks in {name}": near[name] for name in done.parts},
        "not chosen": done.not_chosen,
    }
    sizes = ", ".join(f"{len(part)} {name}" for name, part in done.parts.items())
    lines = [f"{count:7d} {what}" for what, count in counts.items() if count]
    return [*lines, f"split: {len(everything)} tasks into {sizes}, in {out}"]


def _written(path: Path, part: Sequence[Task]) -> dict[str, Any]:
    """Write a part; what the manifest says of it."""
    write_own(path, part)
    return {
        "file": path.name,
        "sha256": _sha256(path),
        "count": len(part),
        "sources": dict(sorted(collections.Counter(task.source for task in part).items())),
        "tasks": {task.id: task_hash(task) for task in part},
    }


def task_hash(task: Task) -> str:
    """sha256 over all that a task is."""
    return hashlib.sha256(json.dumps(row_of(task), sort_keys=True).encode()).hexdigest()


def heldout_sizes(parts: Sequence[str]) -> dict[str, int]:
    """From `name=count` to sizes. Raises InputError."""
    sizes: dict[str, int] = {}
    for part in parts:
        name, equals, count = part.partition("=")
        if not equals or not name.isidentifier() or not count.isdecimal() or name in sizes or name == TRAIN:
            raise InputError(f"held-out part {part!r}: write name=count, such as heldout=500, each name once")
        sizes[name] = int(count)
    return sizes


def _gold_manifest(loaded: Loaded, gold: Gold, summary: GoldSummary, limits: Limits) -> dict[str, Any]:
    return {
        "source": loaded.source,
        **dataclasses.asdict(summary),
        "limits": dataclasses.asdict(limits),
        "rejected_rows": [dataclasses.asdict(row) for row in loaded.rejected],
        "dropped_tasks": [
            {"id": said.id, "reason": said.reason, "detail": said.detail} for said in gold.judged if said.reason
        ],
        "results_wrapped": [said.id for said in gold.judged if said.wrapped and not said.reason],
        "soft_tasks": [said.id for said in gold.judged if said.soft and not said.reason],
    }


def _cases(task: Task) -> int:
    return 0 if isinstance(task.tests, AssertTests) else len(task.tests.cases)


def _described(task: Task) -> list[str]:
    prompt = task.prompt
    text = prompt if isinstance(prompt, str) else "\n".join(f"[{m['role']}] {m['content']}" for m in prompt)
    tests = task.tests
    lines = ["", f"-- {task.id} ({task.source})", _short(text)]
    if isinstance(tests, AssertTests):
        lines += [f"-- tests of {tests.entry_point}", _short(tests.code)]
    elif isinstance(tests, StdinTests):
        lines += [f"-- {len(tests.cases)} cases, compared by {tests.compare}"]
        lines += [f"{_short(repr(c.input), 200)} -> {_short(repr(c.output), 200)}" for c in tests.cases[:SHOWN_CASES]]
    else:
        lines += [f"-- {len(tests.cases)} calls of {tests.entry_point}"]
        lines += [
            _short(json.dumps(row), 400)
            for row in row_of(dataclasses.replace(task, tests=_first(tests)))["tests"]["cases"]
        ]
    return [*lines, "-- reference", _short(task.reference)] if task.reference is not None else lines


def _first(tests: Any) -> Any:
    return dataclasses.replace(tests, cases=tests.cases[:SHOWN_CASES])


def _short(text: str, limit: int = SHOWN) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text)} characters)"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
