"""Trainers beside the driver's own: each an actor on some node, that follows rank 0 as torchrun's other ranks do."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from engine.cluster.connect import MODEL_SECONDS
from engine.cluster.node import ENVIRONMENT, reason_of
from engine.errors import RunError
from engine.recipe import Recipe

START_SECONDS = 180.0
"""For every trainer to be placed."""
END_SECONDS = 20.0
"""For the others to end by themselves once rank 0 has told them, or is gone."""


class TrainerActor:
    """One rank."""

    def place(self) -> str:
        """Answers once it has a place."""
        return str(ray.get_runtime_context().get_node_id())

    def prepare(self, recipe: Recipe) -> None:
        """Find the model and load what training needs, so that what is missing shows before the others wait for it."""
        from engine.start import look

        look(recipe)

    def follow(self, recipe: Recipe, environment: dict[str, str]) -> None:
        """Be a rank until rank 0 ends."""
        os.environ |= environment
        from engine.start import follow

        if recipe.train.device != "cpu":  # of this process's GPUs, which are those that Ray gave it
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"device": "cuda:0"})})
        follow(recipe)


@contextmanager
def trainers(recipe: Recipe) -> Iterator[None]:
    """Start cluster.trainers - 1 others, which wait for rank 0 where this process's environment says from now on.

    Does nothing where there is one alone. Raises RunError where a trainer finds no place, and in the place of another
    error that one of them had first, with its reason.
    """
    assert recipe.cluster is not None
    world = recipe.cluster.trainers
    if world == 1:
        yield
        return
    on_cpu = recipe.train.device == "cpu"
    make: Any = ray.remote(TrainerActor)
    placed = make.options(
        num_cpus=1 if on_cpu else 0, num_gpus=0 if on_cpu else 1, runtime_env={"env_vars": ENVIRONMENT}
    )
    others = [placed.remote() for _ in range(1, world)]
    meeting = {
        "MASTER_ADDR": ray.util.get_node_ip_address(),
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world),
    }
    before = {name: os.environ.get(name) for name in (*meeting, "RANK")}
    try:
        _, late = ray.wait([o.place.remote() for o in others], num_returns=len(others), timeout=START_SECONDS)
        if late:
            raise RunError(
                f"waited {START_SECONDS:.0f} s for a place for {len(late)} of {len(others)} trainers beside the "
                f"driver's; `ray status` shows what else has the cluster's cores and GPUs"
            )
        preparing = [other.prepare.remote(recipe) for other in others]
        ray.wait(preparing, num_returns=len(preparing), timeout=MODEL_SECONDS)
        if said := _first_error(preparing):
            raise RunError(said)
        os.environ |= {**meeting, "RANK": "0"}
        following = [
            # Each has one node's device, whichever Ray gave it, and all that node's cores if it is alone there.
            other.follow.remote(recipe, {**meeting, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
            for rank, other in enumerate(others, start=1)
        ]
        try:
            yield
        except RunError as error:
            if said := _first_error(following):
                raise RunError(f"{said}; {error}") from error
            raise
        ray.wait(following, num_returns=len(following), timeout=END_SECONDS)
    finally:
        for other in others:
            ray.kill(other)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _first_error(following: list[Any]) -> str:
    """Why a trainer ended, if one did by an error of its own; the others then only lost it."""
    done, _ = ray.wait(following, num_returns=len(following), timeout=1.0)
    for rank, answer in enumerate(following, start=1):
        if answer in done:
            try:
                ray.get(answer)
            except (RayActorError, RayTaskError) as error:
                return f"trainer {rank}: {reason_of(error)}"
    return ""


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
