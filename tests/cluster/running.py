"""`rlvr run` over the nodes of a Ray cluster: the run of one machine to the bit, and a node that dies under it."""

from __future__ import annotations

import collections
import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Machines
from tests.small import ROOT, alive, below, facts, finish, gone, lines_of, make_model, start, wait_for, write_recipe

NODES = ("left", "right")


@pytest.fixture(scope="module")
def ready(machines: Machines) -> Machines:
    """The driver's node takes nothing; left and right have room for a sampler and a grader each, and for a trainer."""
    machines.add("driver", cpus=0, PYTHONPATH=str(ROOT))
    for name in NODES:
        machines.add(name, cpus=3, PYTHONPATH=str(ROOT))
    return machines


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_recipe(folder / "recipe.toml", make_model(folder / "model"), rollout_threads=1)


@pytest.fixture
def over(ready: Machines) -> tuple[str, ...]:
    """Two samplers and two graders."""
    values = {"address": f'"{ready.address}"', "samplers": 2, "graders": 2}
    return tuple(f"--set=cluster.{key}={value}" for key, value in values.items())


@pytest.fixture(autouse=True)
def nothing_is_left(ready: Machines) -> Iterator[None]:
    """No process of a run's, wherever it ran, and no memory by name but Ray's own."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert gone(actors(), 30), f"still there: {alive(actors())}"
    assert set(os.listdir("/dev/shm")) <= before


def actors() -> dict[int, str]:
    """Processes of samplers, graders and trainers under this process's nodes."""
    wanted = ("engine.rollout.worker", "SamplerActor", "GraderActor", "TrainerActor", "nsjail")
    return {pid: line for pid, line in below(os.getpid()).items() if any(word in line for word in wanted)}


def sampled(folder: Path) -> dict[str, dict[int, int]]:
    """By file of rollouts, how many members each group has there."""
    return {
        path.name: collections.Counter(json.loads(line)["group"] for line in gzip.open(path, "rt"))
        for path in sorted((folder / "rollouts").iterdir())
    }


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_that_of_one_machine_to_the_bit(recipe: Path, over: tuple[str, ...], tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, how in ((here, ('--set=rollout.devices=["cpu", "cpu"]',)), (there, over)):
        code, out, errors = finish(start(recipe, folder, *how))
        assert code == 0, (out, errors)
    assert facts(there) == facts(here)
    assert "ok   cluster: driver (0 cores, 0 GPUs), left (3 cores, 0 GPUs), right (3 cores, 0 GPUs)" in out
    for number in range(2):
        assert (there / f"sampler-{number}.log").exists()


def test_two_trainers_that_are_killed_leave_nothing_and_one_goes_on(
    recipe: Path, over: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = start(recipe, folder, *over, "--set=cluster.trainers=2", "--max-steps=500")
    wait_for(run, lambda: lines_of(folder) >= 3)
    assert sum("TrainerActor" in line for line in actors().values()) == 1
    assert sum("engine.rollout.worker" in line for line in actors().values()) >= 2
    run.kill()
    finish(run)
    assert gone(actors(), 30), f"still there: {alive(actors())}"
    saved = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())
    changes = ("--allow-change=run.steps", "--allow-change=cluster", "--set=cluster.samplers=1")
    code, out, errors = finish(start(recipe, folder, *over, *changes, "--resume", f"--max-steps={saved + 2}"))
    assert code == 0, (out, errors)
    assert f"going on after step {saved}" in out
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == list(range(1, saved + 3))
    assert max(line["mismatch/mean_abs_logprob"] for line in lines) < 1e-4


def test_a_node_that_dies_costs_no_group_and_one_that_joins_takes_its_place(
    recipe: Path, over: tuple[str, ...], ready: Machines, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    log = folder / "log.txt"
    run = start(recipe, folder, *over, "--set=rollout.max_lag=1", "--set=tasks.heldout={}", "--max-steps=3000")
    wait_for(run, lambda: lines_of(folder) >= 3)
    ready.kill("right")
    wait_for(run, lambda: "on node right is lost with" in log.read_text())
    died = lines_of(folder)
    wait_for(run, lambda: lines_of(folder) >= died + 3)
    ready.add("right", cpus=3, PYTHONPATH=str(ROOT))
    wait_for(run, lambda: "on node right is up again" in log.read_text())
    joined = lines_of(folder)
    wait_for(run, lambda: lines_of(folder) >= joined + 3)
    run.send_signal(signal.SIGINT)
    code, out, errors = finish(run)
    assert code == 0, (out, errors)
    steps = lines_of(folder)
    groups = sampled(folder)
    trained = [group for members in groups.values() for group in members]
    assert len(trained) == len(set(trained)) == 4 * steps
    assert {count for members in groups.values() for count in members.values()} == {4}
    metrics = metrics_of(folder)
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    assert metrics[-1]["perf/sampler_restarts"] == 1
    assert all(line["sync/canary"] < 1e-3 for line in metrics)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("address=127.0.0.1:1", "cluster.address = '127.0.0.1:1': nobody answers there"),
        ("samplers=40", "40 sampler of 1 cores each"),
    ],
)
def test_bad_input_ends_before_anything(
    recipe: Path, over: tuple[str, ...], tmp_path: Path, change: str, said: str
) -> None:
    folder = tmp_path / "run"
    code, out, errors = finish(start(recipe, folder, *over, f"--set=cluster.{change}"))
    assert code == 2, (out, errors)
    assert said in errors
    assert "Traceback" not in errors
    assert not folder.exists()
