"""What of a run a checkpoint holds, and how a run goes on from one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine import recipe_file
from engine.errors import InputError
from engine.recipe import Recipe
from engine.record.folder import FolderError, Records
from engine.types import SuiteResult

if TYPE_CHECKING:
    from engine.parts import Parts
    from engine.record.checkpoint import Saved


def check_recipe(folder: Path, recipe: Recipe, allowed: Sequence[str]) -> None:
    """Refuse to go on in a folder with another recipe than its own, but for the keys that are allowed to change.

    An allowed key may name a whole section. Raises FolderError with every other key that differs.
    """
    for name in allowed:
        section = name.partition(".")[0]
        if section not in Recipe.model_fields:
            raise InputError(
                f"--allow-change {name}: a recipe has no [{section}], only {', '.join(Recipe.model_fields)}"
            )
    path = folder / "recipe.toml"
    if not path.exists():
        return
    differing = recipe_file.differences(recipe_file.load(path), recipe)
    refused = [(k, a, b) for k, a, b in differing if not any(_names(name, k) for name in allowed)]
    if refused:
        said = "; ".join(f"{key} was {was!r}, is {now!r}" for key, was, now in refused)
        raise FolderError(
            f"{path} is another recipe: {said}; go on with the old values, or allow each by --allow-change KEY"
        )


def _names(allowed: str, key: str) -> bool:
    return key == allowed or key.startswith(f"{allowed}.")


def find(folder: Path, say: Callable[[str], object]) -> Saved | None:
    """The newest whole checkpoint of a run's folder; says which it is and which are not whole."""
    from engine.record.checkpoint import newest_whole

    saved = newest_whole(folder / "checkpoints", say)
    if saved is None:
        say(f"{folder} holds no whole checkpoint: starting from step 1")
    else:
        say(f"going on after step {saved.step}, from {saved.path}")
    return saved


def values_of(parts: Parts, step: int) -> dict[str, Any]:
    """Everything but tensors that the run after `step` depends on, as JSON takes it."""
    curriculum = parts.curriculum
    flying = [parts.flying[future].id for future in parts.ahead.untaken]
    name, keys, position, *_ = np.random.get_state(legacy=True)
    return {
        "records": asdict(parts.record.reached(step)),
        "curriculum": {"epoch": curriculum.epoch, "position": curriculum.position},
        # Groups that were sampled ahead are sampled again: their tasks come first.
        "again": [*flying, *(task.id for task in curriculum.again)],
        "groups": parts.groups,
        "too_old": parts.ahead.too_old,
        "canaries": [canary.heard if canary.version == step else None for canary in parts.canaries],
        "before": {name: asdict(result) for name, result in parts.before.items()},
        "random": {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), int(position)]},
    }


def records_of(values: Mapping[str, Any]) -> Records:
    """How far the records of the run's folder go at a checkpoint."""
    records = values["records"]
    return Records(records["step"], records["metrics_bytes"], tuple(records["rollouts"]))


def restore(parts: Parts, saved: Saved) -> None:
    """Put a run's parts where they were at the checkpoint; the samplers get the weights by the next sync.

    Raises InputError where the checkpoint is of another model or names tasks that are not there.
    """
    values = saved.values
    parts.trainer.restore(saved.tensors)
    missing = [name for name in values["again"] if name not in parts.tasks]
    if missing:
        raise InputError(f"{saved.path} was sampling the tasks {', '.join(missing[:3])}, which tasks.train has not")
    parts.curriculum.epoch = values["curriculum"]["epoch"]
    parts.curriculum.position = values["curriculum"]["position"]
    parts.curriculum.again = [parts.tasks[name] for name in values["again"]]
    parts.groups = values["groups"]
    parts.ahead.too_old = values["too_old"]
    for canary, heard in zip(parts.canaries, values["canaries"], strict=False):
        if heard is not None:  # else its sampler was starting
            canary.heard, canary.version = tuple(heard), saved.step
    parts.before = {name: SuiteResult(**result) for name, result in values["before"].items()}
    version, numbers, gauss = values["random"]["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position = values["random"]["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, 0, 0.0))
