"""`rlvr run` under torchrun: two trainers, one of which samples, grades and writes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.small import below, finish, gone, lines_of, make_model, start, wait_for, write_recipe

pytestmark = pytest.mark.slow
TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--standalone", "--no-python")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_recipe(folder / "recipe.toml", make_model(folder / "model"), run_steps=4)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_trainers_come_to_what_one_does_and_others_go_on_from_there(recipe: Path, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    run = start(recipe, two, "--max-steps", "2", prefix=TORCHRUN)
    wait_for(run, lambda: lines_of(two) >= 1)
    processes = below(run.pid)
    assert sum("rlvr run" in line and "torchrun" not in line for line in processes.values()) == 2
    code, out, errors = finish(run)
    assert code == 0, (out, errors)
    assert gone(processes)
    code, out, errors = finish(start(recipe, one))
    assert code == 0, (out, errors)
    ours, theirs = metrics(two), metrics(one)
    for mine, other in zip(ours, theirs, strict=False):
        for key in ("loss", "grad_norm", "reward/mean"):
            assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    changes = ("run.steps", "train.sharded")
    sharded = ("--max-steps", "3", "--set", "train.sharded=true", *(f"--allow-change={key}" for key in changes))
    code, out, errors = finish(start(recipe, two, "--resume", *sharded, prefix=TORCHRUN))
    assert code == 0, (out, errors)
    code, out, errors = finish(start(recipe, two, "--resume", *(f"--allow-change={key}" for key in changes)))
    assert code == 0, (out, errors)
    assert [line["step"] for line in metrics(two)] == [1, 2, 3, 4]
    assert metrics(two)[3]["reward/mean"] == pytest.approx(theirs[3]["reward/mean"], abs=0.2)


def test_a_trainer_that_dies_ends_the_run_with_the_reason(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(recipe, folder, "--set", "run.steps=200", prefix=TORCHRUN)
    wait_for(run, lambda: lines_of(folder) >= 1)
    processes = below(run.pid)
    trainers = sorted(pid for pid, line in processes.items() if "rlvr run" in line and "torchrun" not in line)
    [follower] = [pid for pid in trainers if not below(pid)]
    os.kill(follower, signal.SIGKILL)
    code, _, errors = finish(run)
    assert code != 0
    assert "lost the others while" in errors or "SIGKILL" in errors
    assert gone(processes)
