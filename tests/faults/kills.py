"""Twenty SIGKILLs at random instants, in loading, in steps and in the middle of a checkpoint: nothing is lost."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.faults.left import Left
from tests.small import facts, finish, lines_of, make_model, start, wait_for, write_recipe

KILLS = 20
STEPS = 70
SEED = int(os.environ.get("RLVR_FAULTS_SEED", "1"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_recipe(folder / "recipe.toml", make_model(folder / "model"), run_steps=STEPS, eval_every=10)


def test_twenty_kills(recipe: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    left = Left()
    code, out, errors = finish(start(recipe, whole), seconds=600)
    assert code == 0, (out, errors)
    assert left.nothing(), left.said
    chance = random.Random(SEED)
    places = ["checkpoint"] * 5 + ["loading"] * 3 + ["step"] * (KILLS - 8)
    chance.shuffle(places)
    print(f"\nseed {SEED}, {STEPS} steps, a checkpoint every 2")
    print("kill  in          seconds  step  half-written      newest checkpoint")
    for number, place in enumerate(places, 1):
        row = kill_once(recipe, killed, place, chance)
        print(f"{number:>4}  {row}", flush=True)
        assert left.nothing(), left.said
    code, out, errors = finish(start(recipe, killed, "--resume"), seconds=600)
    assert code == 0, (out, errors)
    assert left.nothing(), left.said
    assert not list((killed / "checkpoints").glob("*.part"))
    expected, found = facts(whole), facts(killed)
    for what, value in expected.items():
        assert found[what] == value, what
    print(f"metrics, rollouts, adapter and summary of {STEPS} steps equal those of a run that was never killed")


def kill_once(recipe: Path, folder: Path, place: str, chance: random.Random) -> str:
    """Start or resume, kill at a random instant of `place`; a line that says where it was."""
    boards, checkpoints = folder / "tensorboard", folder / "checkpoints"
    before = len(list(boards.glob("events*")))
    saved = [path.name for path in sorted(checkpoints.glob("step-*[0-9]"))]
    done = int(saved[-1][5:]) if saved else 0
    began = time.monotonic()
    run = start(recipe, folder, "--resume")

    def opened() -> bool:
        """The records are cut back and open."""
        return len(list(boards.glob("events*"))) > before

    if place == "loading":
        until = began + chance.uniform(0.5, 10)
        wait_for(run, lambda: time.monotonic() > until or (opened() and lines_of(folder) > done))
    elif place == "step":
        more = chance.randrange(1, 4)
        wait_for(run, lambda: opened() and lines_of(folder) >= done + more)
        time.sleep(chance.uniform(0, 0.4))
    else:
        wait_for(run, opened)
        while not list(checkpoints.glob("*.part")):
            assert run.poll() is None, run.communicate()
    assert run.poll() is None, f"the run ended before it was killed, STEPS is too small: {run.communicate()}"
    run.kill()
    run.communicate()
    half = [path.name for path in checkpoints.glob("*.part")]
    names = sorted(path.name for path in checkpoints.glob("step-*[0-9]"))
    newest = int(names[-1][5:]) if names else 0
    seconds = time.monotonic() - began
    return f"{place:<10}  {seconds:7.1f}  {lines_of(folder):>4}  {''.join(half) or '-':<16}  {newest}"
