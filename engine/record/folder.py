"""A run's folder: recipe, manifest, metrics, rollouts, summary."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import recipe_file
from engine.errors import InputError, RunError
from engine.recipe import Recipe
from engine.record.board import Board
from engine.record.lock import LOCK, lock_folder
from engine.record.manifest import manifest_of, read_manifest
from engine.snapshot import Snapshot
from engine.types import Graded, Sampled, Task


class FolderError(InputError):
    """The run's folder can't be made or is taken."""


def choose_folder(recipe: Recipe, output: str | None, *, resume: bool = False) -> Path:
    """The run's folder: `output`, which must be new or empty, or the first free `runs/<name>[-N]`; nothing is made.

    resume: `output` may also be a run's folder. Raises FolderError, also where the folder can't be written.
    """
    chosen = output or recipe.run.output
    if chosen:
        folder = Path(chosen)
        if folder.exists() and not folder.is_dir():
            raise FolderError(f"--output {folder}: it is a file; name a new or empty folder")
        if folder.exists() and any(folder.iterdir()):
            is_run = any((folder / name).exists() for name in ("recipe.toml", LOCK))
            if not is_run:
                raise FolderError(f"--output {folder}: it holds something that is no run; name a new or empty folder")
            if not resume:
                lock_folder(folder).close()  # a run that is writing it is named
                raise FolderError(
                    f"--output {folder}: it holds a run already; go on with it by --resume, or name a new folder"
                )
    elif resume:
        raise FolderError("--resume needs --output DIR, the folder of the run to go on with")
    else:
        folder = Path("runs") / recipe.run.name
        number = 1
        while folder.exists():
            number += 1
            folder = Path("runs") / f"{recipe.run.name}-{number}"
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise FolderError(f"{folder}: {there} can't be written by this user, or is read-only; name another folder")
    return folder


def create_folder(folder: Path) -> Path:
    """Make the run's folder and what stands in it from the start."""
    try:
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{folder}: can't be made: {error.strerror}") from error
    return folder


@dataclass(frozen=True, slots=True)
class Records:
    """How far a run's records go at a checkpoint."""

    step: int = 0
    metrics_bytes: int = 0
    rollouts: tuple[str, ...] = ()
    """The files' names."""


class RunFolder:
    """Writes a run's records; every line is flushed, so a killed run keeps what it had.

    history: the metrics of the steps that the folder held already.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        snapshot: Snapshot,
        data: Mapping[str, Sequence[Task]],
        records: Records | None = None,
    ) -> None:
        """records: what of the folder's stays; what a killed run wrote after it is cut off.

        Raises FolderError where metrics.jsonl does not go as far as `records` says.
        """
        self.path = folder
        records = records or Records()
        self.history = _cut_back(folder, records)
        manifest = manifest_of(recipe, snapshot, data, read_manifest(folder))
        _whole(folder / "recipe.toml", recipe_file.dump(recipe))
        _whole(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        self._metrics = (folder / "metrics.jsonl").open("a")
        self._board = Board(folder / "tensorboard", recipe_file.dump(recipe), purge_step=records.step + 1)

    def reached(self, step: int) -> Records:
        """How far the records go after `step`, all of it on the disk."""
        rollouts = self.path / "rollouts"
        os.fsync(self._metrics.fileno())
        _to_disk(rollouts)  # the files themselves were synced as they were written
        names = sorted(path.name for path in rollouts.iterdir())
        return Records(step, os.fstat(self._metrics.fileno()).st_size, tuple(names))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl and the same scalars for TensorBoard."""
        with _named(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps({"step": step, **values}) + "\n")
            self._metrics.flush()
        self._board.scalars(step, values)

    def rollouts(
        self,
        name: str,
        sampled: Sampled,
        tasks: Mapping[str, Task],
        gaps: Mapping[int, tuple[tuple[int, float], ...]] | None = None,
    ) -> None:
        """rollouts/<name>.jsonl.gz: every completion with what became of it; gaps: as in `StepStats`."""
        numbers = ((index, member) for index in sampled.trained for member, _ in enumerate(sampled.groups[index]))
        trained = {place: (gaps or {}).get(number, ()) for number, place in enumerate(numbers)}
        with (
            _aside(self.path / "rollouts" / f"{name}.jsonl.gz") as path,
            gzip.open(path, "wt", compresslevel=5) as file,
        ):
            for index, (group, row) in enumerate(zip(sampled.groups, sampled.advantages, strict=True)):
                for member, (graded, advantage) in enumerate(zip(group, row, strict=True)):
                    line = _rollout(graded, advantage, tasks[graded.completion.task_id])
                    more = {"trained": (index, member) in trained, "gaps": trained.get((index, member), ())}
                    file.write(json.dumps(line | more) + "\n")
        if name.startswith("step-"):
            self._board.rollouts(int(name.removeprefix("step-")), sampled)

    def summary(self, values: Mapping[str, Any]) -> None:
        """summary.json, whole or not at all."""
        _whole(self.path / "summary.json", json.dumps(values, indent=2) + "\n")

    def close(self) -> None:
        """Flush and close the files."""
        self._metrics.close()
        self._board.close()


def _cut_back(folder: Path, records: Records) -> list[dict[str, float]]:
    """Cut the records back to a checkpoint's; the metrics that stay, a step each."""
    path = folder / "metrics.jsonl"
    size = path.stat().st_size if path.exists() else 0
    if size < records.metrics_bytes:
        raise FolderError(
            f"{path} has {size} bytes, the checkpoint of step {records.step} was made after {records.metrics_bytes}: "
            f"put the file back, or start a new run in another folder"
        )
    if size:
        os.truncate(path, records.metrics_bytes)
    history = [json.loads(line) for line in path.read_text().splitlines()] if size else []
    if [line.pop("step") for line in history] != list(range(1, records.step + 1)):
        raise FolderError(f"{path} does not hold steps 1 to {records.step}, a line each: put the file back")
    for file in (folder / "rollouts").glob("*"):
        if file.name not in records.rollouts:
            file.unlink()
    (folder / "summary.json").unlink(missing_ok=True)
    return history


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A disk that is full or fails is a RunError that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror}; the run goes on from its newest checkpoint with --resume"
        ) from error


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """Where to write what becomes `target` once it is whole and on the disk; nothing is left of it otherwise."""
    aside = target.with_name(f"{target.name}.part")
    try:
        with _named(target):
            yield aside
            _to_disk(aside)
            os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with _aside(path) as aside:
        aside.write_text(text)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
