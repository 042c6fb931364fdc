"""What an evaluation is of: a run, one of its steps, an adapter or a plain model, as one recipe and one snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import recipe_file
from engine.errors import InputError
from engine.recipe import Model, Recipe, Rollout, Run, Tasks
from engine.record.trained import CONFIG, Trained, base_of, read
from engine.snapshot import Snapshot, check_source, hash_folder, resolve

DEFAULT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the recipe that says how it is prompted, sampled and judged."""

    name: str
    recipe: Recipe
    snapshot: Snapshot
    adapter: Trained | None = None
    """For the snapshot's model."""
    step: int | None = None
    """After which it was trained so far."""
    home: Path | None = None
    """The run's folder, where there is one."""
    part: str = "model"
    """What of the run it is, for the name of a folder: `base`, `step-000050`, or `model`, its end."""

    def identity(self) -> dict[str, Any]:
        """What protocol.json says of the model."""
        return {
            "name": self.name,
            "source": self.snapshot.source,
            "sha256": self.snapshot.sha256,
            "adapter_sha256": hash_folder(self.adapter.folder) if self.adapter else None,
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
        return _of_run(folder, _here(recipe_file.load(folder / "recipe.toml", overrides)), step, base)
    if step is not None or base:
        raise InputError(f"{given} is no run (it has no recipe.toml): --step and --base go with one")
    if (folder / CONFIG).is_file():
        trained = read(folder, None)
        settings = _settings(recipe, overrides, str(trained.info["base_model"]), sha256)
        return _trained(folder.resolve().name, settings, trained, None)
    settings = _settings(recipe, overrides, given, sha256)
    snapshot = resolve(settings.model.source, settings.model.sha256)
    return Subject(folder.resolve().name if folder.is_dir() else given, settings, snapshot)


def _here(recipe: Recipe) -> Recipe:
    """An evaluation is for one machine, also where its run was for several."""
    return recipe.model_copy(update={"cluster": None})


def _settings(recipe: Path | None, overrides: tuple[str, ...], source: str, sha256: str) -> Recipe:
    if recipe is not None:
        wheel = (f"model.sha256={sha256}",) if sha256 else ()
        settings = _here(recipe_file.load(recipe, (*overrides, f"model.source={source}", *wheel)))
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
        snapshot = resolve(recipe.model.source, recipe.model.sha256)
        return Subject(f"{name}, base", recipe, snapshot, home=folder, part="base")
    trained = read(folder, step)
    if step is None:
        return _trained(name, recipe, trained, folder)
    return replace(_trained(f"{name}, step {step}", recipe, trained, folder), part=f"step-{step:06d}")


def _trained(name: str, recipe: Recipe, trained: Trained, home: Path | None) -> Subject:
    if trained.factors is None:
        snapshot, adapter = Snapshot(str(trained.folder), trained.folder, hash_folder(trained.folder)), None
    else:
        snapshot, adapter = base_of(trained, recipe.model.source, any_base=False), trained
    return Subject(name, recipe, snapshot, adapter, trained.info["step"], home)
