"""However a run ends, no sampler and no jail outlives it. `make faults` has more; SIGKILL is in test_resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.small import below, finish, gone, lines_of, make_model, start, wait_for, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_recipe(folder / "recipe.toml", make_model(folder / "model"), tasks_heldout={}, run_steps=4)


def test_ctrl_c_twice_ends_a_run_now(recipe: Path, tmp_path: Path) -> None:
    run = start(recipe, tmp_path / "run", "--set", "rollout.prompts_per_step=48")
    wait_for(run, lambda: lines_of(tmp_path / "run") >= 1)
    children = below(run.pid)
    assert any("engine.rollout.worker" in line for line in children.values())
    assert any("nsjail" in line for line in children.values())
    os.kill(run.pid, signal.SIGINT)
    assert run.stderr is not None
    while "stopping" not in run.stderr.readline():
        assert run.poll() is None
    os.kill(run.pid, signal.SIGINT)
    code, out, errors = finish(run)
    assert code == 130, (out, errors)
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert gone(children)
    assert not list((tmp_path / "run").glob("checkpoints/*.part"))


def test_a_canary_that_fails_stops_the_run_before_it_trains(recipe: Path, tmp_path: Path) -> None:
    """No sampler agrees with its trainer to 1e-12 nats."""
    run = start(recipe, tmp_path / "run", "--set", "sync.tolerance=1e-12")
    code, out, errors = finish(run)
    assert code == 1, (out, errors)
    assert "CanaryError: after the sync of version 0 trainer and sampler differ by" in errors
    assert "sync.tolerance is 1e-12" in errors
    assert lines_of(tmp_path / "run") == 0
    assert not any((tmp_path / "run" / name).exists() for name in ("adapter", "checkpoints", "summary.json"))
