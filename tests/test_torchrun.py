"""`rlvr run` under torchrun: two trainers, one of which samples, grades and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.small import TORCHRUN, below, finish, gone, lines_of, make_model, start, wait_for, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_recipe(folder / "recipe.toml", make_model(folder / "model"), run_steps=2)


def test_two_trainers_share_a_run(recipe: Path, tmp_path: Path) -> None:
    """That they compute what one does is shown by tests/train/test_ranks.py; tests/faults/ends.py kills one."""
    folder = tmp_path / "run"
    run = start(recipe, folder, "--set", "train.sharded=true", prefix=TORCHRUN)
    wait_for(run, lambda: lines_of(folder) >= 1)
    processes = below(run.pid)
    assert sum("rlvr run" in line and "torchrun" not in line for line in processes.values()) == 2
    code, out, errors = finish(run)
    assert code == 0, (out, errors)
    assert gone(processes)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["sync/canary"] < 1e-3 for line in lines)
    assert max(line["mismatch/mean_abs_logprob"] for line in lines) < 1e-4
