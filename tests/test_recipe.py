from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from engine import recipe_file as recipes
from engine.recipe_file import RecipeError

MINIMAL = {
    "run": {"name": "x", "steps": 3},
    "model": {"source": "somewhere"},
    "tasks": {"train": "generated:train"},
}


def with_keys(**sections: dict[str, object]) -> dict[str, object]:
    return {**MINIMAL, **{name: {**MINIMAL.get(name, {}), **keys} for name, keys in sections.items()}}


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_survive_a_round_trip(path: Path) -> None:
    recipe = recipes.load(path)
    assert recipes.parse(tomllib.loads(recipes.dump(recipe))) == recipe


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (with_keys(rollout={"grop_size": 4}), ["rollout.grop_size", "4", "group_size"]),
        ({**MINIMAL, "optm": {"lr": 1.0}}, ["optm", "optim"]),
        (with_keys(run={"steps": "3"}), ["run.steps", "'3'", "integer"]),
        (with_keys(run={"steps": 0}), ["run.steps", "0", "1"]),
        (with_keys(rollout={"group_size": 1}), ["rollout.group_size", "1", "2"]),
        (with_keys(rollout={"top_p": 0.9}), ["rollout.top_p", "0.9", "allow_off_policy_sampling"]),
        (with_keys(rollout={"top_k": 50}), ["rollout.top_k", "50"]),
        (with_keys(rollout={"max_lag": 9}), ["rollout.max_lag", "9", "8"]),
        ({**MINIMAL, "full": {}, "sync": {"install": "adapter"}}, ["sync.install", "adapter", "merged"]),
        (with_keys(tasks={"prompt": "caht"}), ["tasks.prompt", "'caht'", "chat"]),
        (with_keys(reward={"passed": 0.0}), ["reward", "passed = 1.0"]),
        ({**MINIMAL, "cluster": {"sampler": 2}}, ["cluster.sampler", "2", "samplers"]),
        ({**MINIMAL, "cluster": {}, "sync": {"transport": "gloo"}}, ["sync.transport", "gloo", "[cluster]", "auto"]),
        (
            {**MINIMAL, "cluster": {}, "rollout": {"devices": ["cpu", "cpu"]}},
            ["rollout.devices", "2 devices", "cluster.samplers", "['cpu']"],
        ),
        ({"run": {"name": "x", "steps": 3}}, ["model is missing", "tasks is missing"]),
        (with_keys(run={"name": "../escape"}), ["run.name", "../escape"]),
        (
            {**MINIMAL, "gate": [{"metric": "pass_rate", "after": 3, "stop_if": "tiny"}]},
            ["gate.0.stop_if", "tiny"],
        ),
    ],
)
def test_a_bad_recipe_is_refused_naming_key_value_and_nearest(table: dict[str, object], words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        recipes.parse(table)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_off_policy_sampling_can_be_allowed() -> None:
    table = with_keys(rollout={"top_p": 0.95, "allow_off_policy_sampling": True})
    assert recipes.parse(table).rollout.top_p == 0.95


def test_base_is_layered_and_overrides_win(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        '[run]\nname = "a"\nsteps = 3\n[model]\nsource = "m"\n[tasks]\ntrain = "t"\n[optim]\nlr = 0.5\nwarmup = 2\n'
    )
    (tmp_path / "over.toml").write_text('base = "base.toml"\n[optim]\nlr = 0.25\n')
    recipe = recipes.load(tmp_path / "over.toml", ("run.steps=9", "run.name=second", "optim.betas=[0.8, 0.9]"))
    assert (recipe.optim.lr, recipe.optim.warmup, recipe.run.steps) == (0.25, 2, 9)
    assert (recipe.run.name, recipe.optim.betas) == ("second", (0.8, 0.9))
    changed = {key for key, _, _ in recipes.differences(recipes.load(tmp_path / "base.toml"), recipe)}
    assert changed == {"optim.lr", "run.steps", "run.name", "optim.betas"}


@pytest.mark.parametrize("override", ["steps=3", "run.steps", "gate.metric=3", "run.nam=3"])
def test_a_bad_override_is_refused(override: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[run]\nname = "a"\nsteps = 3\n[model]\nsource = "m"\n[tasks]\ntrain = "t"\n')
    with pytest.raises(RecipeError):
        recipes.load(path, (override,))


def test_a_circle_of_bases_and_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"')
    (tmp_path / "b.toml").write_text('base = "a.toml"')
    (tmp_path / "broken.toml").write_text("[run\n")
    for name, word in (
        ("a.toml", "comes back"),
        ("broken.toml", "not valid TOML"),
        ("c.toml", "no such recipe"),
    ):
        with pytest.raises(RecipeError, match=word):
            recipes.load(tmp_path / name)
