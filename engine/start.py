"""From a recipe to a started run: everything that can be refused is refused before anything is written."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.errors import InputError, RunError
from engine.imports import TURNS, without_collector
from engine.preflight import require, require_devices
from engine.recipe import Recipe
from engine.record.folder import choose_folder, create_folder
from engine.record.lock import lock_folder
from engine.resume import check_recipe, find
from engine.snapshot import Snapshot, check_source, resolve
from engine.tasks import load_tasks, to_download

if TYPE_CHECKING:
    from engine.cluster.node import Node
    from engine.record.checkpoint import Saved

RESUME = "rlvr run {folder}/recipe.toml --output {folder} --resume"


def check(recipe: Recipe, nodes: Sequence[Node] = ()) -> None:
    """Look at recipe, machine and a cluster's nodes without loading a model; prints each check. Raises InputError."""
    check_source(recipe.model.source, recipe.model.sha256)
    require_devices(recipe)
    if recipe.cluster:
        from engine.cluster.connect import require as require_nodes

        require_nodes(recipe, nodes)
        click.echo(f"ok   cluster: {', '.join(f'{n.name} ({n.cpus} cores, {n.gpus} GPUs)' for n in nodes)}")
    for source in (recipe.tasks.train, *recipe.tasks.heldout.values()):
        for what in to_download(source):
            click.echo(f"     will fetch {what}")
        load_tasks(source)
    for done in require(recipe):
        click.echo(f"ok   {done.name}: {done.detail}")


def start(
    recipe: Recipe, output: str | None, *, resume: bool = False, allowed: Sequence[str] = (), quiet: bool = False
) -> None:
    """Check, fetch the model, make the folder, run; then say what came out and what to type next.

    resume: go on with the run in `output`, whose recipe may differ in the keys `allowed`. quiet: no line a step.
    Started by torchrun, rank 0 does all this and the other trainers do as it does.

    Raises InputError before the folder is made, and RunError, SandboxError or OSError after.
    """
    if _rank_and_world()[0] > 0:
        return follow(recipe)
    if _take_turns(recipe):
        for name, value in TURNS.items():
            os.environ.setdefault(name, value)  # before torch is imported, and for the sampler
    folder = choose_folder(recipe, output, resume=resume)
    going_on = resume and folder.exists()
    with ExitStack() as stack:
        if going_on:
            stack.enter_context(lock_folder(create_folder(folder)))
            check_recipe(folder, recipe, allowed)
        nodes = stack.enter_context(_joined(recipe))
        check(recipe, nodes)
        snapshot, trained = look(recipe)
        if recipe.cluster:
            from engine.cluster.connect import require_model

            require_model(recipe, snapshot, nodes)
        if not going_on:
            stack.enter_context(lock_folder(create_folder(folder)))
        click.echo(f"ok   model: {snapshot.folder} (sha256 {snapshot.sha256[:12]}), {_what(recipe, trained)}")
        saved = find(folder, click.echo) if resume else None
        if saved and saved.step >= recipe.run.steps and (folder / "summary.json").exists():
            click.echo(f"{folder}: the run is finished, see its summary.json; more steps: --allow-change run.steps")
            return
        _run(recipe, folder, snapshot, saved, quiet)


def _joined(recipe: Recipe) -> AbstractContextManager[Sequence[Node]]:
    """This process in the recipe's cluster, whose nodes it gives; none where the recipe is for one machine."""
    if recipe.cluster is None:
        return nullcontext(())
    if _rank_and_world()[1] > 1:
        raise InputError(
            "[cluster] under torchrun: there cluster.trainers says how many trainers; start rlvr run alone"
        )
    from engine.cluster.connect import joined

    return joined(recipe.cluster)


def _rank_and_world() -> tuple[int, int]:
    """This trainer's number and how many torchrun or Ray started; (0, 1) without them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _take_turns(recipe: Recipe) -> bool:
    """Whether one sampler and one trainer share this machine, and only one of them works at a time."""
    alone = recipe.cluster is None and len(recipe.samplers) == 1 and _rank_and_world()[1] == 1
    return alone and recipe.rollout.max_lag == 0


def follow(recipe: Recipe) -> None:
    """Load the model and do what rank 0 does until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 finishes its step and saves, and this one with it
    snapshot, _ = look(recipe)
    import torch

    from engine.train import Trainer
    from engine.train.ranks import Ranks

    kind, _, index = recipe.train.device.partition(":")
    device = kind if kind == "cpu" else f"{kind}:{int(index or 0) + int(os.environ['LOCAL_RANK'])}"
    torch.set_num_threads(_threads(recipe))
    with Ranks(*_rank_and_world(), device=device) as ranks:
        own = recipe.model_copy(update={"train": recipe.train.model_copy(update={"device": device})})
        ranks.follow(Trainer(own, snapshot.folder, ranks))


def _others(recipe: Recipe) -> AbstractContextManager[None]:
    """The trainers beside this one that Ray starts; torchrun has started its own."""
    if recipe.cluster is None:
        return nullcontext()
    from engine.cluster.trainers import trainers

    return trainers(recipe)


def _threads(recipe: Recipe) -> int:
    """Of a CPU trainer, which shares the cores with the others of its host."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return recipe.train.threads or max(1, len(os.sched_getaffinity(0)) // here)


def look(recipe: Recipe) -> tuple[Snapshot, list[str]]:
    """The model, fetched, and what of it is trained. Raises InputError for what only the model can tell."""
    snapshot = resolve(recipe.model.source, recipe.model.sha256)
    # From here on the run's own parts are needed, which take seconds to import.
    with without_collector():
        from engine.train.policy import trained_names
        from engine.train.step import loss_spec

    try:
        loss_spec(recipe)
        how = recipe.full or recipe.lora
        assert how is not None  # a recipe has one of the two
        return snapshot, trained_names(snapshot.folder, how)
    except (ValueError, LookupError) as error:
        raise InputError(str(error)) from None


def _run(recipe: Recipe, folder: Path, snapshot: Snapshot, saved: Saved | None, quiet: bool) -> None:
    import torch
    from safetensors import SafetensorError

    from engine.run import run
    from engine.train.ranks import Ranks

    torch.set_num_threads(_threads(recipe))
    click.echo(f"run  {folder}: loading vLLM and the trainer")
    try:
        with _others(recipe):
            ranks = Ranks(*_rank_and_world(), device=recipe.train.device)
            summary = run(recipe, folder, snapshot, len(os.sched_getaffinity(0)), saved, ranks, quiet=quiet)
    except SafetensorError as error:
        raise RunError(f"{folder}: what was trained could not be written: {error}; go on with --resume") from error
    if summary is None:
        click.echo(f"next:    {RESUME.format(folder=shlex.quote(str(folder)))}")
        return
    for what in ("adapter", "model"):
        if what in summary:
            click.echo(f"{what + ':':8} {summary[what]}")
    board = f"tensorboard --logdir {folder / 'tensorboard'}"
    click.echo(f"next:    rlvr show {folder}    or    rlvr report {folder}    or    {board}")


def _what(recipe: Recipe, trained: list[str]) -> str:
    return f"LoRA on {len(trained)} layers" if recipe.lora else f"{len(trained)} weight tensors trained"
