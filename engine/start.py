"""From a recipe to a started run: everything that can be refused is refused before anything is written."""

from __future__ import annotations

import os

import click

from engine.errors import InputError
from engine.preflight import require, require_devices
from engine.recipe import Recipe
from engine.record.folder import choose_folder, create_folder
from engine.snapshot import check_source, resolve
from engine.tasks import load_tasks, to_download


def check(recipe: Recipe) -> None:
    """Look at recipe and machine without loading a model; prints each check. Raises InputError."""
    check_source(recipe.model.source, recipe.model.sha256)
    require_devices(recipe)
    for source in (recipe.tasks.train, *recipe.tasks.heldout.values()):
        for what in to_download(source):
            click.echo(f"     will fetch {what}")
        load_tasks(source)
    for done in require(recipe):
        click.echo(f"ok   {done.name}: {done.detail}")


def start(recipe: Recipe, output: str | None) -> None:
    """Check, fetch the model, make the folder, run; then say what came out and what to type next.

    Raises InputError before the folder is made, and RunError, SandboxError or OSError after.
    """
    folder = choose_folder(recipe, output)
    check(recipe)
    snapshot = resolve(recipe.model.source, recipe.model.sha256)
    import torch  # from here on the run's own parts are needed, which take seconds to import

    from engine.run import run
    from engine.train.policy import trained_names
    from engine.train.step import loss_spec

    try:
        loss_spec(recipe)
        how = recipe.full or recipe.lora
        assert how is not None  # a recipe has one of the two
        trained = trained_names(snapshot.folder, how)
    except (ValueError, LookupError) as error:
        raise InputError(str(error)) from None
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(recipe.train.threads or cores)
    create_folder(folder)
    click.echo(f"ok   model: {snapshot.folder} (sha256 {snapshot.sha256[:12]}), {_what(recipe, trained)}")
    click.echo(f"run  {folder}: loading vLLM and the trainer")
    summary = run(recipe, folder, snapshot, cores)
    for what in ("adapter", "model"):
        if what in summary:
            click.echo(f"{what + ':':8} {summary[what]}")
    click.echo(f"next:    rlvr show {folder}    or    tensorboard --logdir {folder / 'tensorboard'}")


def _what(recipe: Recipe, trained: list[str]) -> str:
    return f"LoRA on {len(trained)} layers" if recipe.lora else f"{len(trained)} weight tensors trained"
