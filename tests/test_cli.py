"""Bad input: exit 2, one message, no traceback, no half-made folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def rlvr(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [str(Path(sys.executable).parent / "rlvr"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120)


QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes/no.toml"], ["recipes/no.toml", "no such recipe"]),
        ([QUICKSTART, "--set", "rollout.grop_size=4"], ["rollout.grop_size", "4", "group_size"]),
        ([QUICKSTART, "--set", "run.steps=many"], ["run.steps", "many", "integer"]),
        ([QUICKSTART, "--set", "rollout.group_size=1"], ["rollout.group_size", "1", "2"]),
        ([QUICKSTART, "--set", "rollout.top_p=0.9"], ["rollout.top_p", "0.9"]),
        ([QUICKSTART, "--set", "tasks.train=generated:tran"], ["generated:tran", "generated:train"]),
        ([QUICKSTART, "--set", "model.source=nowhere"], ["model.source", "nowhere", "hf:org/name@revision"]),
        ([QUICKSTART, "--set", "model.sha256=beef"], ["model.sha256"]),
        ([QUICKSTART, "--set", "sandbox.require=['netwrok']"], ["netwrok", "network"]),
        ([QUICKSTART, "--max-steps", "0"], ["--max-steps", "0"]),
        ([QUICKSTART, "--stpes", "3"], ["--stpes"]),
    ],
)
def test_bad_input_is_one_message_and_exit_2(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = rlvr("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora.targets=['q_porj']", ["lora.targets", "q_porj", "q_proj"]),
        ("loss.objective=clipp", ["loss.objective", "clipp", "clip"]),
    ],
)
def test_what_only_the_model_can_tell_is_refused_before_the_folder(
    tmp_path: Path, override: str, words: list[str]
) -> None:
    done = rlvr("run", QUICKSTART, "--set", override, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    done = rlvr("run", QUICKSTART, "--output", "mine", cwd=tmp_path)
    assert (done.returncode, "holds" in done.stderr) == (2, True), done.stderr
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_two_gpu_recipe_without_gpus_names_the_cpu_recipe(tmp_path: Path) -> None:
    done = rlvr("run", str(ROOT / "recipes" / "reasoning.toml"), cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert "2 GPUs" in done.stderr
    assert "quickstart.toml" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_a_recipe_that_loads(tmp_path: Path) -> None:
    done = rlvr("run", QUICKSTART, "--dry-run", "--set", "run.name=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "resolved.toml").write_text(done.stdout[done.stdout.index("[run]") :])
    from engine import recipe_file as recipes

    assert recipes.load(tmp_path / "resolved.toml") == recipes.load(QUICKSTART, ("run.name=again",))


def test_doctor_lists_the_machine(tmp_path: Path) -> None:
    done = rlvr("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in ("vllm", "sandbox network", "memory", "disk"))


def test_show_without_a_run_says_so(tmp_path: Path) -> None:
    done = rlvr("show", "runs/none", cwd=tmp_path)
    assert (done.returncode, "runs/none" in done.stderr) == (2, True)
