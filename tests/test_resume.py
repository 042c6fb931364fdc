"""A run that is killed and goes on ends as one that was not; what is refused on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.small import below, facts, finish, gone, lines_of, make_model, start, wait_for, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_recipe(folder / "recipe.toml", make_model(folder / "model"))


def test_a_killed_run_goes_on_to_the_bit(recipe: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, out, errors = finish(start(recipe, whole))
    assert code == 0, (out, errors)
    expected = facts(whole)
    assert any(line["grad_norm"] > 0 for line in expected["metrics"])

    run = start(recipe, killed)
    try:
        wait_for(run, lambda: lines_of(killed) == 5)
        os.kill(run.pid, signal.SIGSTOP)
        other = finish(start(recipe, killed, "--resume"))
        assert other[0] == 2
        assert f"process id {run.pid}" in other[2]
        children = below(run.pid)
        sampler = next(pid for pid, line in children.items() if "engine.rollout.worker" in line)
        assert b"GOMP_SPINCOUNT" in Path(f"/proc/{sampler}/environ").read_bytes()  # it and the trainer take turns
        assert any("nsjail" in line for line in children.values())
    finally:
        run.kill()
        run.communicate()
    assert gone(children)

    newest = killed / "checkpoints" / "step-000004" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    refused = finish(start(recipe, killed, "--resume", "--set", "optim.lr=1e-4"))
    assert refused[0] == 2
    assert "optim.lr was 0.005, is 0.0001" in refused[2]
    code, out, errors = finish(start(recipe, killed, "--resume"))
    assert code == 0, (out, errors)
    assert "step-000004 is not whole: state.safetensors has" in out
    assert "going on after step 2" in out
    assert facts(killed) == expected
    shutil.rmtree(killed)


def test_ctrl_c_finishes_the_step_saves_and_exits_with_0(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(recipe, folder, "--set", "checkpoint.every=0", "--set", "tasks.heldout={}", "--set", "run.steps=1000")
    wait_for(run, lambda: lines_of(folder) >= 2)
    children = below(run.pid)
    os.kill(run.pid, signal.SIGINT)
    code, out, errors = finish(run)
    assert code == 0, (out, errors)
    done = lines_of(folder)
    assert f"stopped after step {done}" in out.replace("\n", " ")
    assert "--resume" in out
    [checkpoint] = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{done:06d}"
    assert json.loads((checkpoint / "adapter" / "training_info.json").read_text())["step"] == done
    assert gone(children)
