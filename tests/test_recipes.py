"""The published runs' recipes: each loads, says what its card says, and the matched pair differs as it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine import recipe_file
from engine.cli import commands

RECIPES = Path(__file__).parents[1] / "recipes"

CARDS: dict[str, dict[str, Any]] = {
    "direct": {
        "run.seed": 42, "run.steps": 1000, "model.dtype": "bfloat16", "lora.rank": 32, "lora.alpha": 64.0,
        "tasks.chat_template.enable_thinking": False, "rollout.group_size": 8, "rollout.prompts_per_step": 1,
        "rollout.temperature": 0.7, "rollout.top_p": 0.95, "rollout.max_tokens": 2048, "reward.passed": 1.0,
        "reward.share": 0.0, "reward.format": 0.0, "loss.kl": 0.04, "optim.lr": 5e-6, "optim.schedule": "cosine",
        "optim.warmup": 30, "optim.max_grad_norm": 1.0, "optim.weight_decay": 0.0, "train.checkpointing": True,
    },
    "reasoning": {
        "run.seed": 42, "run.steps": 1000, "tasks.chat_template.enable_thinking": True, "rollout.max_tokens": 8192,
        "rollout.group_size": 8, "rollout.temperature": 0.7, "reward.passed": 1.0, "reward.require_thought": True,
    },
    "hidden-tests": {
        "lora.rank": 16, "optim.lr": 5e-6, "loss.kl": 0.0, "rollout.temperature": 0.7, "rollout.max_tokens": 2048,
        "rollout.group_size": 8, "sandbox.cpu_seconds": 10.0, "tasks.suffix": "\n\n/no_think",
        "tasks.system": "Ты — опытный Python-разработчик. Дай готовый код одним python-блоком.",
    },
    "deepcoder": {
        "run.steps": 100, "lora.rank": 32, "lora.alpha": 32.0, "tasks.chat_template.reasoning_effort": "low",
        "rollout.prompts_per_step": 50, "rollout.group_size": 4, "rollout.max_tokens": 12288,
        "rollout.temperature": 1.0, "rollout.top_p": 1.0, "rollout.top_k": 0, "optim.lr": 1e-5, "loss.kl": 0.0,
        "loss.objective": "importance_sampling", "loss.old": "sampler",
        "rollout.devices": ("cuda:1", "cuda:2"), "train.device": "cuda:0",
    },
}  # fmt: skip


def value(recipe: object, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[part] if isinstance(recipe, dict) else getattr(recipe, part)
    return recipe


@pytest.mark.parametrize("name", CARDS)
def test_a_published_recipe_says_what_its_card_says(name: str) -> None:
    recipe = recipe_file.load(RECIPES / f"{name}.toml")
    assert {key: value(recipe, key) for key in CARDS[name]} == CARDS[name]


def test_the_matched_runs_differ_in_checkpoint_and_thinking_alone() -> None:
    done = CliRunner().invoke(commands, ["diff", str(RECIPES / "direct.toml"), str(RECIPES / "reasoning.toml")])
    assert [line.partition(":")[0] for line in done.output.splitlines()] == [
        "run.name",
        "model.source",
        "tasks.chat_template.enable_thinking",
        "rollout.max_tokens",
        "reward.require_thought",
    ]


def test_equal_recipes_differ_in_nothing() -> None:
    same = str(RECIPES / "quickstart.toml")
    assert CliRunner().invoke(commands, ["diff", same, same]).output == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepcoder"])  # the one with the most devices; each takes ten seconds
def test_a_published_recipe_is_planned_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of the real recipe, with the quickstart's model in the place of one that must be downloaded."""
    quick = recipe_file.load(RECIPES / "quickstart.toml").model
    targets = "['q_proj','k_proj','v_proj','o_proj','gate_proj','up_proj','down_proj','lm_head']"
    monkeypatch.chdir(RECIPES.parent)
    options = [f"model.source={quick.source}", f"model.sha256={quick.sha256}", f"lora.targets={targets}"]
    done = CliRunner().invoke(
        commands,
        ["run", str(RECIPES / f"{name}.toml"), "--dry-run", *(part for o in options for part in ("--set", o))],
        catch_exceptions=False,
    )
    recipe = recipe_file.load(RECIPES / f"{name}.toml")
    plans = [line for line in done.output.splitlines() if line.startswith("plan ")]
    devices = [line.split(":", 2)[0].rpartition(" ")[2] for line in plans]
    assert devices == ["cuda"] * (1 + len(recipe.rollout.devices))
    assert all("GiB" in line for line in plans)
    assert f"{recipe.rollout.prompts_per_step} prompts x {recipe.rollout.group_size}" in done.output
    assert "is not there yet" in done.output  # the tasks are made first
    assert done.exit_code == 0
