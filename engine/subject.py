"""What an evaluation is of: a run, one of its steps, an adapter or a plain model, as one recipe and one snapshot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import recipe_file
from engine.errors import InputError
from engine.recipe import Model, Recipe, Rollout, Run, Tasks
from engine.snapshot import Snapshot, check_source, hash_folder, resolve

DEFAULT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the recipe that says how it is prompted, sampled and judged."""

    name: str
    recipe: Recipe
    snapshot: Snapshot
    adapter: Path | None = None
    """A folder in PEFT's format, for the snapshot's model."""
    step: int | None = None
    home: Path | None = None
    """The run's folder, where there is one."""

    def identity(self) -> dict[str, Any]:
        """What protocol.json says of the model."""
        return {
            "name": self.name,
            "source": self.snapshot.source,
            "sha256": self.snapshot.sha256,
            "adapter_sha256": hash_folder(self.adapter) if self.adapter else None,
            "step": self.step,
        }


def find_subject(
    given: str, *, recipe: Path | None, overrides: tuple[str, ...], step: int | None, base: bool, sha256: str
) -> Subject:
    """What `given` names: a run's folder, an adapter's folder, or a model source as a recipe names it.

    recipe: says how a subject that is no run is prompted and sampled; without one, chat prompts and 1,024 tokens.
    step: a checkpoint of the run instead of its end. base: the run's base model under the run's own settings.
    Raises InputError for whatever can't be found, and for an adapter of another base model.
    """
    folder = Path(given)
    if (folder / "recipe.toml").is_file():
        if recipe:
            raise InputError(f"{given} is a run, which has a recipe of its own: leave --recipe out, or use --set")
        return _of_run(folder, recipe_file.load(folder / "recipe.toml", overrides), step, base)
    if step is not None or base:
        raise InputError(f"{given} is no run (it has no recipe.toml): --step and --base go with one")
    if (folder / "adapter_config.json").is_file():
        info = _info(folder)
        settings = _settings(recipe, overrides, info["base_model"], sha256)
        return _with_adapter(folder.resolve().name, settings, folder, None)
    settings = _settings(recipe, overrides, given, sha256)
    snapshot = resolve(settings.model.source, settings.model.sha256)
    return Subject(folder.name if folder.is_dir() else given, settings, snapshot)


def _settings(recipe: Path | None, overrides: tuple[str, ...], source: str, sha256: str) -> Recipe:
    if recipe is not None:
        wheel = (f"model.sha256={sha256}",) if sha256 else ()
        settings = recipe_file.load(recipe, (*overrides, f"model.source={source}", *wheel))
    else:
        plain = Recipe(
            run=Run(name="evaluation", steps=1),
            model=Model(source=source, sha256=sha256),
            tasks=Tasks(train="humaneval", prompt="chat"),
            rollout=Rollout(max_tokens=DEFAULT_TOKENS),
        )
        settings = recipe_file.override(plain, overrides)
    check_source(settings.model.source, settings.model.sha256)
    return settings


def _of_run(folder: Path, recipe: Recipe, step: int | None, base: bool) -> Subject:
    """A run's end, one of its checkpoints, or its base."""
    name = recipe.run.name
    if base:
        return Subject(f"{name}, base", recipe, resolve(recipe.model.source, recipe.model.sha256), home=folder)
    place = folder / "checkpoints" / f"step-{step:06d}" if step is not None else folder
    label = f"{name}, step {step}" if step is not None else name
    if recipe.full is not None:
        model = place / "model"
        if not (model / "config.json").is_file():
            raise InputError(f"{model}: no model is there{_steps(folder)}")
        return Subject(label, recipe, Snapshot(str(model), model, hash_folder(model)), step=step, home=folder)
    adapter = place / "adapter"
    if not (adapter / "adapter_config.json").is_file():
        raise InputError(f"{adapter}: no adapter is there{_steps(folder)}")
    return _with_adapter(label, recipe, adapter, folder)


def _with_adapter(name: str, recipe: Recipe, adapter: Path, home: Path | None) -> Subject:
    info = _info(adapter)
    snapshot = resolve(recipe.model.source, recipe.model.sha256)
    if info["base_model_sha256"] != snapshot.sha256:
        raise InputError(
            f"{adapter} was trained on {info['base_model']} (sha256 {info['base_model_sha256'][:12]}), but "
            f"{snapshot.source} is another model (sha256 {snapshot.sha256[:12]})"
        )
    return Subject(name, recipe, snapshot, adapter, info["step"], home)


def _info(adapter: Path) -> dict[str, Any]:
    path = adapter / "training_info.json"
    try:
        info: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is missing: it says which base model the adapter belongs to") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    missing = {"base_model", "base_model_sha256", "step"} - info.keys()
    if missing:
        raise InputError(f"{path} lacks {', '.join(sorted(missing))}")
    return info


def _steps(folder: Path) -> str:
    found = sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))
    return f"; there are checkpoints of the steps {', '.join(map(str, found))}" if found else "; it has no checkpoints"
