"""Joining a cluster, and everything that is refused there before anything is loaded."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.connect import joined, require, require_model, require_room, require_same
from engine.cluster.node import Node
from engine.errors import InputError
from engine.recipe import Cluster, Recipe
from engine.snapshot import resolve
from tests.cluster.conftest import Machines

ROOT = Path(__file__).resolve().parents[2]
MODEL = "/proc/self/cwd/model"
"""A path that each node sees in its own way."""


def recipe(cluster: dict[str, Any], rollout: dict[str, Any] | None = None, device: str = "cpu") -> Recipe:
    """A recipe that starts nothing."""
    table = {
        "run": {"name": "x", "steps": 1},
        "model": {"source": MODEL},
        "tasks": {"train": "generated"},
        "rollout": rollout or {},
        "train": {"device": device},
        "cluster": cluster,
    }
    return Recipe.model_validate(table)


def test_without_ray_a_cluster_recipe_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None\nfrom engine.errors import InputError\n"
    code += "try:\n    import engine.cluster.connect\nexcept InputError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install 'rlvr[cluster]'" in done.stdout


def test_auto_starts_no_cluster(tmp_path: Path) -> None:
    code = """
import pathlib
from engine.cluster.connect import joined
from engine.errors import InputError
from engine.recipe import Cluster
try:
    with joined(Cluster()):
        pass
except InputError as error:
    print(error)
names = [path.read_text().split()[1] for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
print([name for name in names if "ray" in name or "gcs" in name])
"""
    # With processes of its own, so that no other cluster of this machine is found.
    alone = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = str(tmp_path)
    done = subprocess.run(alone, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    said, processes = done.stdout.splitlines()
    assert said.startswith(
        "cluster.address = 'auto': this machine belongs to no Ray cluster; start one with `ray start"
    )
    assert processes == "[]"
    assert done.stderr == ""


@pytest.mark.parametrize("address", ["local", "ray://127.0.0.1:10001", "127.0.0.1"])
def test_an_address_that_is_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cluster.address = .*write host:port"):
        with joined(Cluster(address=address)):
            pass
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match=r"RAY_ADDRESS = .*write host:port"):
        with joined(Cluster()):
            pass


def test_nobody_at_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"cluster.address = '{address}': nobody answers there"):
            with joined(Cluster(address=address)):
                pass


@pytest.mark.slow
def test_a_driver_on_a_machine_that_is_no_node(nodes: tuple[Node, ...], machines: Machines) -> None:
    code = f"""
from engine.cluster.connect import joined
from engine.errors import InputError
from engine.recipe import Cluster
try:
    with joined(Cluster(address={machines.address!r})):
        pass
except InputError as error:
    print(error)
"""
    # In a space of its own it sees the head and no raylet.
    alone = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    environment = os.environ | {"RAY_gcs_server_request_timeout_seconds": "3"}
    done = subprocess.run(alone, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "and this machine a node, else type `ray start --address=" in done.stdout, done.stderr


def make_model(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(text)


@pytest.fixture(scope="module")
def nodes(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, ...]]:
    """driver: as it should be. other: another source of the package and another model. bare: a GPU, no model."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for package in ("engine", "kernels", "sandbox"):
        shutil.copytree(ROOT / package, elsewhere / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (elsewhere / "engine" / "recipe.py").open("a") as file:
        file.write("# as somebody else left it\n")
    here = machines.add("driver", cpus=2)
    make_model(here / "model", "{}")
    make_model(machines.add("other", cpus=2, PYTHONPATH=str(elsewhere)) / "model", '{"another": 1}')
    machines.add("bare", cpus=1, gpus=1)
    before, cwd = signal.getsignal(signal.SIGTERM), Path.cwd()
    os.chdir(here)  # Ray puts the driver's into the path of every worker
    try:
        with joined(Cluster(address=machines.address)) as found:
            assert signal.getsignal(signal.SIGTERM) is before, "Ray's handler stays: a run could not be stopped"
            yield tuple(sorted(found, key=lambda node: ["driver", "other", "bare"].index(node.name)))
    finally:
        os.chdir(cwd)


@pytest.mark.slow
def test_what_is_found_out(nodes: tuple[Node, ...]) -> None:
    assert [(n.name, n.cpus, n.gpus) for n in nodes] == [("driver", 2, 0), ("other", 2, 0), ("bare", 1, 1)]
    for node in nodes:
        assert node.found["python"] == ".".join(map(str, sys.version_info[:3]))
        assert node.found["nsjail"].endswith("nsjail")
        assert all(node.found[what] for what in ("rlvr", "source", "ray", "torch", "vllm"))
    assert nodes[0].found["source"] == nodes[2].found["source"] != nodes[1].found["source"]


@pytest.mark.slow
def test_a_node_with_another_source_is_refused_by_name(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(
        InputError, match=r"node other: the source of rlvr is [0-9a-f]{12} there, .* `ray start` that node"
    ):
        require(recipe({}), nodes)
    require_same(recipe({}), [nodes[0], nodes[2]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "rollout", "device", "missing"),
    [
        ({"graders": 6}, {}, "cpu", "6 grader of 1 cores each; .* no node has 1 cores left for grader 5 of 6"),
        ({"grader_cpus": 3}, {}, "cpu", "driver 2 cores, .* no node has 3 cores left for grader 1 of 1"),
        ({"sampler_cpus": 2, "samplers": 3}, {}, "cpu", "no node has 2 cores left for sampler 3 of 3"),
        ({"samplers": 2}, {"devices": ("cuda:0",)}, "cpu", "bare 1 GPUs and 1 cores.*1 GPUs left for sampler 2 of 2"),
        ({}, {"devices": ("cuda:0", "cuda:1"), "tensor_parallel": 2}, "cpu", "no node has 2 GPUs left for sampler 1"),
        ({"trainers": 3}, {}, "cuda:0", "1 GPUs left for trainer beside the driver 2 of 2"),
    ],
)
def test_too_little_room(
    nodes: tuple[Node, ...], cluster: dict[str, Any], rollout: dict[str, Any], device: str, missing: str
) -> None:
    with pytest.raises(InputError, match=missing):
        require_room(recipe(cluster, rollout, device), nodes)


@pytest.mark.slow
def test_enough_room(nodes: tuple[Node, ...]) -> None:
    require_room(recipe({"graders": 3, "sampler_cpus": 2}), nodes)
    require_room(recipe({"graders": 5}, {"devices": ("cuda:0",)}), nodes)


@pytest.mark.slow
def test_the_model_must_be_the_same_on_every_node(nodes: tuple[Node, ...]) -> None:
    driver, other, bare = nodes
    want, snapshot = recipe({}), resolve(MODEL)
    with pytest.raises(InputError, match=f"node bare: model.source = '{MODEL}': neither a folder"):
        require_model(want, snapshot, [driver, bare])
    with pytest.raises(InputError, match=f"node other: the model in {MODEL} has sha256 [0-9a-f]{{12}}, the driver's"):
        require_model(want, snapshot, [driver, other])
    require_model(want, snapshot, [driver])


@pytest.mark.slow
def test_a_node_that_only_grades_needs_no_model(nodes: tuple[Node, ...]) -> None:
    require_model(recipe({"sampler_cpus": 2}), resolve(MODEL), [nodes[0], nodes[2]])
