"""Checkpoints: written aside, vouched for by a manifest that is written last, and only then given their name.

    checkpoints/step-NNNNNN/
      adapter/ or model/   what was trained, as the export writes it
      state.safetensors    what the next optimizer step depends on
      state.json           what the rest of the run depends on
      manifest.json        size and sha256 of each file

Nothing here runs code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.errors import InputError, RunError

MARKER, TENSORS, VALUES = "manifest.json", "state.safetensors", "state.json"
FORMAT = 1
ASIDE, OLD, DAMAGED = ".part", ".old", ".damaged"
"""Endings of a checkpoint that is being written, of one that is being removed, of one that was found not whole."""


class NotWhole(Exception):
    """A checkpoint that can't be trusted; the text says why."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint, read."""

    path: Path
    step: int
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    export: Callable[[Path], object],
) -> Path:
    """Write `root/step-NNNNNN`, durably and whole or not at all; `export` writes what was trained into a folder.

    Raises RunError where the disk is full or fails: what is there already stays as it is.
    """
    target = root / f"step-{step:06d}"
    aside, old = _ending(target, ASIDE), _ending(target, OLD)
    try:
        root.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        export(aside)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, aside / TENSORS)
        (aside / VALUES).write_text(json.dumps({"format": FORMAT, **values}) + "\n")
        files = {str(file.relative_to(aside)): _facts(file) for file in _files(aside)}
        _sync(*_files(aside))
        (aside / MARKER).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n")
        _sync(aside / MARKER, *(path for path in aside.rglob("*") if path.is_dir()), aside)
        if target.exists():
            target.rename(old)
        aside.rename(target)
        _sync(root)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        there = steps_of(root)
        raise RunError(
            f"{target}: the checkpoint could not be written: {error}; "
            + (f"the one of step {max(there)} is whole" if there else "there is none before it")
        ) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def load(path: Path) -> Saved:
    """Read a checkpoint. Raises NotWhole where a file is missing or is not what the manifest says of it.

    Raises InputError for a checkpoint of another format than this version of rlvr writes.
    """
    try:
        manifest = json.loads((path / MARKER).read_text())
        files, step = dict(manifest["files"]), int(manifest["step"])
    except FileNotFoundError:
        raise NotWhole(f"it has no {MARKER}, which is written last") from None
    except (ValueError, KeyError, TypeError) as error:
        raise NotWhole(f"its {MARKER} is damaged: {error!r}") from None
    for name, facts in files.items():
        try:
            found = _facts(path / name)
        except FileNotFoundError:
            raise NotWhole(f"{name} is missing") from None
        if found["size"] != facts["size"]:
            raise NotWhole(f"{name} has {found['size']} bytes instead of {facts['size']}")
        if found != facts:
            raise NotWhole(f"{name} holds other bytes than were written")
    values = json.loads((path / VALUES).read_text())
    if values.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {values.get('format')}, this rlvr reads {FORMAT}: use the rlvr that wrote it"
        )
    return Saved(path, step, load_file(path / TENSORS), values)


def newest_whole(root: Path, say: Callable[[str], object]) -> Saved | None:
    """The newest checkpoint that is whole; those that are not are named to `say` and set aside as `*.damaged`.

    What a killed run was writing or removing is taken away.
    """
    for ending in (ASIDE, OLD):
        for left in root.glob(f"step-*{ending}"):
            shutil.rmtree(left)
    for step in sorted(steps_of(root), reverse=True):
        path = root / f"step-{step:06d}"
        try:
            return load(path)
        except NotWhole as error:
            aside = _ending(path, DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            say(f"{path} is not whole: {error}; set aside as {aside.name}, the one before it is used")
    return None


def prune(root: Path, keep: int, keep_every: int) -> None:
    """Remove the checkpoints that `kept` does not name."""
    there = steps_of(root)
    for step in sorted(there - kept(there, keep, keep_every)):
        path = root / f"step-{step:06d}"
        old = path.rename(_ending(path, OLD))  # what is half removed never looks like a checkpoint
        shutil.rmtree(old)


def kept(steps: Collection[int], keep: int, keep_every: int) -> set[int]:
    """Of these steps the newest `keep`, and every multiple of `keep_every`, 0 being none."""
    newest = sorted(steps)[-keep:]
    return {step for step in steps if step in newest or (keep_every and step % keep_every == 0)}


def steps_of(root: Path) -> set[int]:
    """The steps of which there is a checkpoint, whole or not."""
    found = (re.fullmatch(r"step-(\d{6,})", path.name) for path in root.glob("step-*"))
    return {int(match[1]) for match in found if match}


def _ending(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(*paths: Path) -> None:
    """Files or folders onto the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
