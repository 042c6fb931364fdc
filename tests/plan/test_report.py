"""`rlvr plan` as a person calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import recipe_file
from engine.plan import plan_lines
from tests.plan.a_run import OVERRIDES, QUICKSTART, ROOT, write_run

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SMALL = [part for override in OVERRIDES for part in ("--set", override)]


def rlvr(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "rlvr"), "plan", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def local(path: Path, tmp_path: Path, *overrides: str) -> recipe_file.Recipe:
    """A recipe with a model whose config.json is here."""
    shape = {
        "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return recipe_file.load(path, (f"model.source={tmp_path}", *overrides))


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem != "deepcoder"], ids=lambda p: p.stem)
def test_every_recipe_is_planned_in_lines_that_fit(path: Path, tmp_path: Path) -> None:
    lines = list(plan_lines(local(path, tmp_path), ["plan trainer on cuda:1: 9 GiB"]))
    assert lines[0] == "plan trainer on cuda:1: 9 GiB"
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for words in ("data sheet, nothing measured", "bottleneck", "1,024", "the driver's", "billion parameters"):
        assert words in text
    head = next(number for number, line in enumerate(lines) if "samplers:trainers  unused" in line)
    sizes = [line.split()[0] for line in lines[head + 2 : head + 9]]
    assert sizes == ["2", "4", "8", "16", "64", "256", "1,024"]


def test_what_is_asked_for_is_what_is_planned(tmp_path: Path) -> None:
    recipe = local(ROOT / "recipes" / "direct.toml", tmp_path)
    out = tmp_path / "plan.json"
    list(plan_lines(recipe, samplers=2, trainers=3, gpu="a100", mean_tokens=500, out=out))
    found = json.loads(out.read_text())
    assert (found["plan"]["setup"]["samplers"], found["plan"]["setup"]["trainers"]) == (2, 3)
    assert found["phases"]["mean_tokens"] == pytest.approx(500, rel=0.05)
    assert any("a100" in said for said in found["basis"])
    assert [row["gpus"] for row in found["table"]] == [2, 4, 8, 16, 64, 256, 1024]


def test_a_run_says_the_times_and_a_sheet_beside_it_only_the_gpu(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    recipe = local(QUICKSTART, tmp_path, *OVERRIDES)
    of_run, of_both = (tmp_path / "run.json", tmp_path / "both.json")
    text = "\n".join(plan_lines(recipe, run=run, out=of_run))
    assert "times of the run, from 9 steps" in text
    assert "data sheet" not in text
    list(plan_lines(recipe, run=run, gpu="h100", out=of_both))
    ours, sheets = (json.loads(path.read_text())["phases"] for path in (of_run, of_both))
    assert ours["mean_tokens"] == sheets["mean_tokens"]
    assert ours["grade_seconds"] == sheets["grade_seconds"] == pytest.approx(0.4, rel=0.05)
    assert ours["decode_seconds"] == pytest.approx(0.02, rel=0.05)
    assert sheets["decode_seconds"] < 0.015


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h10"], ["--gpu h10", "did you mean h100"]),
        (["--samplers", "0"], ["--samplers", "0"]),
        (["--trainers", "-1"], ["--trainers", "-1"]),
        (["--from", "empty"], ["--from empty", "metrics.jsonl"]),
        (["--from", "nowhere"], ["--from nowhere", "metrics.jsonl"]),
        (["--mean-tokens", "9999"], ["--mean-tokens 9999", "rollout.max_tokens = 16"]),
        (["--mean-tokens", "5", "--from", "run"], ["--mean-tokens 5", "--from run"]),
        (["--set", "rollout.grop_size=4"], ["rollout.grop_size", "group_size"]),
        (["--set", "model.source=hf:org/base@main"], ["hf:org/base@main", "no size"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    done = rlvr(str(QUICKSTART), *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith(("rlvr:", "Error:"))]) == 1, done.stderr


@pytest.mark.slow
def test_the_command_plans_from_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    done = rlvr(str(QUICKSTART), *SMALL, "--from", "run", "--samplers", "2", "--json", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "times of the run" in done.stdout
    assert done.stdout.startswith("plan trainer on cpu: ")
    assert json.loads((tmp_path / "plan.json").read_text())["plan"]["setup"]["samplers"] == 2


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    hide = "import sys; sys.modules.update(torch=None, transformers=None, vllm=None, huggingface_hub=None)"
    call = f"sys.argv = ['rlvr', 'plan', {str(QUICKSTART)!r}, '--from', 'run', '--set', 'model.source=hf:a/b-1b@main']"
    command = [sys.executable, "-c", f"{hide}; {call}; from engine.cli import main; main()"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "note no memory plan: it needs torch" in done.stdout
    assert "1,024" in done.stdout
