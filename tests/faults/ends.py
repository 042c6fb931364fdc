"""Faults on the real parts: what a person reads, what is left, and that the run goes on. More is in test_resume.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.tasks import Curriculum, load_tasks
from tests.faults.left import Left
from tests.small import TORCHRUN, below, facts, finish, gone, lines_of, make_model, start, wait_for, write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_recipe(folder / "recipe.toml", make_model(folder / "model"), run_steps=12)


@pytest.fixture(scope="module")
def expected(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run comes to that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, out, errors = finish(start(recipe, folder))
    assert code == 0, (out, errors)
    return facts(folder)


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    """Nothing is left after each test."""
    looking = Left()
    yield
    assert looking.nothing(), looking.said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def resumed(recipe: Path, folder: Path, *options: str, python_path: Path | None = None) -> str:
    code, out, errors = finish(start(recipe, folder, "--resume", *options, python_path=python_path))
    assert code == 0, (out, errors)
    return out


def test_a_disk_that_fills_twice(recipe: Path, expected: dict[str, Any], small_disk: Path) -> None:
    """First no checkpoint goes on it, then, where the run goes on, not even a line of metrics."""
    folder, filler, going_on = small_disk / "run", small_disk / "filler", tuple[str, ...]()
    for room, word in ((30_000, "the checkpoint could not be"), (2_000, "could not be written")):
        found = lines_of(folder)
        run = start(recipe, folder, *going_on)
        wait_for(run, lambda found=found: lines_of(folder) >= found + 3)  # type: ignore[misc]
        os.kill(run.pid, signal.SIGSTOP)
        disk = os.statvfs(small_disk)
        filler.write_bytes(b"x" * (disk.f_bavail * disk.f_frsize - room))
        os.kill(run.pid, signal.SIGCONT)
        code, out, errors = finish(run)
        assert code == 1, (out, errors)
        assert word in errors
        assert "No space left on device" in errors
        assert "Traceback" not in errors
        filler.unlink()
        going_on = ("--resume",)
    assert "is not whole" not in resumed(recipe, folder)
    assert facts(folder) == expected


def test_killed_jails_change_no_reward(recipe: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(recipe, folder)
    for step in (1, 3, 5):
        wait_for(run, lambda step=step: lines_of(folder) >= step)  # type: ignore[misc]
        jails = [pid for pid, line in below(run.pid).items() if "nsjail" in line]
        os.kill(jails[-1], signal.SIGKILL)
    code, out, errors = finish(run)
    assert code == 0, (out, errors)
    assert facts(folder) == expected


def test_sigterm_saves_and_the_run_goes_on_to_the_bit_though_its_clock_jumps(
    recipe: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Every look at the wall clock, the trainer's and the sampler's, is off by up to a day, forwards or back."""
    clock, folder = tmp_path / "clock", tmp_path / "run"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(
        "import random, time\n"
        "true, dice = time.time, random.Random(0)\n"
        "time.time = lambda: true() + dice.uniform(-86400, 86400)\n"
        "time.time_ns = lambda: int(time.time() * 1e9)\n"
        "print('the clock jumps', flush=True)\n"
    )
    run = start(recipe, folder, "--set", "checkpoint.every=0", python_path=clock)
    wait_for(run, lambda: lines_of(folder) >= 3)
    os.kill(run.pid, signal.SIGTERM)
    code, out, errors = finish(run)
    assert code == 0, (out, errors)
    assert "the clock jumps" in out
    assert "stopped after step" in out
    out = resumed(recipe, folder, "--allow-change", "checkpoint.every", python_path=clock)
    assert "the clock jumps" in out
    assert "the clock jumps" in (folder / "sampler.log").read_text()
    assert facts(folder) == expected


def test_a_mismatch_above_its_limit_ends_the_run_before_another_step(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {
        "sync.max_mismatch": 1e-12, "sync.transport": "gloo", "run.steps": 30, "checkpoint.every": 1,
        "tasks.heldout": "{}",
    }  # fmt: skip
    run = start(recipe, folder, *(f"--set={key}={value}" for key, value in options.items()))
    code, out, errors = finish(run)
    assert code == 1, (out, errors)
    assert "Traceback" not in errors
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert f"step {len(lines)}: trainer and sampler differ by" in errors
    assert len(lines) < 30
    far = [line["step"] for line in lines if line["mismatch/mean_abs_logprob"] > 1e-12]
    assert far == [len(lines)]  # steps before it had no group with a signal
    assert not (folder / "checkpoints" / f"step-{len(lines):06d}").exists()


def test_a_run_survives_the_core_and_nothing_survives_the_run(recipe: Path, tmp_path: Path) -> None:
    """vLLM's core is a process of its own below the sampler's, where the engine is asynchronous."""
    folder = tmp_path / "run"
    options = {"run.steps": 100, "rollout.engine": '"async"', "tasks.heldout": "{}"}
    run = start(recipe, folder, *(f"--set={key}={value}" for key, value in options.items()))
    wait_for(run, lambda: lines_of(folder) >= 1)
    sampler = next(pid for pid, line in below(run.pid).items() if "engine.rollout.worker" in line)
    [core] = [pid for pid, line in below(sampler).items() if "EngineCore" in line or "spawn_main" in line]
    os.kill(core, signal.SIGKILL)
    seen = lines_of(folder)
    wait_for(run, lambda: lines_of(folder) >= seen + 2)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["perf/sampler_restarts"] == 1
    assert last["sync/canary"] < 1e-3
    processes = below(run.pid)
    assert any("engine.rollout.worker" in line for line in processes.values())
    os.kill(run.pid, signal.SIGKILL)
    finish(run)
    assert gone(processes, 5)


def test_a_trainer_that_dies_ends_the_run_with_the_reason_and_one_goes_on_alone(recipe: Path, tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", ("--set", "tasks.heldout={}")
    sharded = ("--set", "run.steps=200", "--set", "train.sharded=true")
    run = start(recipe, folder, *whole, *sharded, prefix=TORCHRUN)
    wait_for(run, lambda: lines_of(folder) >= 3)
    processes = below(run.pid)
    trainers = sorted(pid for pid, line in processes.items() if "rlvr run" in line and "torchrun" not in line)
    [follower] = [pid for pid in trainers if not below(pid)]
    os.kill(follower, signal.SIGKILL)
    code, _, errors = finish(run)
    assert code != 0
    assert "lost the others while" in errors or "SIGKILL" in errors
    assert gone(processes)
    done = lines_of(folder)
    steps = ("--max-steps", str(done + 2), "--allow-change", "run.steps", "--allow-change", "train.sharded")
    resumed(recipe, folder, *whole, *steps)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, done + 3))
    assert all(line["sync/canary"] < 1e-3 for line in lines)


def test_a_read_only_folder_is_refused_before_anything_is_loaded(recipe: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, out, errors = finish(start(recipe, small_disk / "run"))
    assert code == 2, (out, errors)
    assert str(small_disk) in errors
    assert len(errors.strip().splitlines()) == 1
    assert "loading" not in out


def test_groups_sampled_ahead_are_sampled_again(recipe: Path, tmp_path: Path) -> None:
    import gzip

    folder, ahead = tmp_path / "run", ("--set", "rollout.max_lag=2")
    run = start(recipe, folder, *ahead)
    wait_for(run, lambda: lines_of(folder) >= 5)
    sampler = next(pid for pid, line in below(run.pid).items() if "engine.rollout.worker" in line)
    assert b"GOMP_SPINCOUNT" not in Path(f"/proc/{sampler}/environ").read_bytes()  # trainer and sampler work at once
    run.kill()
    run.communicate()
    resumed(recipe, folder, *ahead)
    trained: Counter[str] = Counter()
    for step in range(1, 13):
        with gzip.open(folder / "rollouts" / f"step-{step:06d}.jsonl.gz", "rt") as file:
            rows = [json.loads(line) for line in file]
        trained.update(row["task"] for row in rows if row["member"] == 0)
        assert all(0 <= step - 1 - row["version"] <= 2 for row in rows)
    # On a busy machine a group may be overtaken until it is too old: it is dropped, counted and replaced by the next.
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    dropped = int(last["groups/too_old"])
    taken = Counter(task.id for task in Curriculum(load_tasks("generated:train"), seed=3).take(12 * 4 + dropped))
    assert trained <= taken  # none comes twice
    assert (taken - trained).total() == dropped  # none is lost


def test_a_killed_sampler_is_replaced_and_the_run_goes_on(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(recipe, folder)
    wait_for(run, lambda: lines_of(folder) >= 1)
    os.kill(next(pid for pid, line in below(run.pid).items() if "engine.rollout.worker" in line), signal.SIGKILL)
    code, out, errors = finish(run)
    assert code == 0, (out, errors)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["perf/sampler_restarts"] == 1
    assert all(line["sync/canary"] < 1e-3 for line in lines)


def test_ctrl_c_twice_ends_a_run_now(recipe: Path, tmp_path: Path) -> None:
    run = start(recipe, tmp_path / "run", "--set", "rollout.prompts_per_step=48", "--set", "tasks.heldout={}")
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
