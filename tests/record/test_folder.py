from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine import recipe_file as recipes
from engine.recipe import Lora
from engine.record import RunFolder, choose_folder, create_folder, step_metrics
from engine.record.export import export_adapter
from engine.record.folder import FolderError
from engine.record.show import ShowError, Wanted, reward_range, show
from engine.snapshot import Snapshot
from engine.types import Sampled, StepStats, Task
from sandbox import StdinTests
from tests.conftest import completion, graded

RECIPE = recipes.parse(
    {
        "run": {"name": "x", "steps": 3},
        "model": {"source": "somewhere"},
        "tasks": {"train": "generated:train"},
    }
)
STATS = StepStats(0.5, 1.0, 1e-3, 2.0, 0.0, 0.0, 0.1, 1e-5, 1e-4, 1e-9, 12, 0.9, 1.1, 12, 40, 1, False, 0, 20.0, 18.0)
TASKS = {f"task-{g}": Task(f"task-{g}", "print [b]x[/b]:", StdinTests(()), source="s") for g in range(2)}
GROUPS = [
    [
        graded(completion(0, 0, (1,), (2, 3), text="[red]1"), 1.0),
        graded(completion(0, 1, (1,), (2,), finish="length"), 0.0),
    ],
    [graded(completion(1, 0, (1,), (2, 3)), 0.5), graded(completion(1, 1, (1,), (4,)), None)],
]
SAMPLED = Sampled(GROUPS, [[0.5, -0.5], [0.0, 0.0]], (0,), 1, 0)


def test_a_run_folder_holds_what_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create_folder(choose_folder(RECIPE, str(tmp_path / "run")))
    record = RunFolder(folder, RECIPE, Snapshot("somewhere", tmp_path, "beef"), {"train": list(TASKS.values())})
    metrics = step_metrics(SAMPLED, STATS, {"sample": 2.0, "train": 1.0}, 1e-6)
    record.metrics(1, metrics)
    record.rollouts("step-000001", SAMPLED, TASKS, {1: ((0, -0.7),)})
    record.summary({"steps": 1})
    record.close()
    assert json.loads((folder / "metrics.jsonl").read_text()) == {"step": 1, **metrics}
    assert recipes.load(folder / "recipe.toml") == RECIPE
    assert json.loads((folder / "manifest.json").read_text())["model"] == {
        "source": "somewhere",
        "sha256": "beef",
    }
    with gzip.open(folder / "rollouts" / "step-000001.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert [(r["task"], r["member"], r["reward"], r["advantage"], r["trained"]) for r in rows] == [
        ("task-0", 0, 1.0, 0.5, True), ("task-0", 1, 0.0, -0.5, True),
        ("task-1", 0, 0.5, 0.0, False), ("task-1", 1, None, 0.0, False),
    ]  # fmt: skip
    assert [r["gaps"] for r in rows] == [[], [[0, -0.7]], [], []]
    assert list((folder / "tensorboard").glob("events*"))
    show(folder, None)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("print [b]x[/b]:", "[red]1", "reward masked", "+0.500"))
    with pytest.raises(ShowError, match="no step 7"):
        show(folder, 7)
    show(folder, 1, Wanted(verdict="AC", low=0.5))
    shown = capsys.readouterr().out
    assert "1 of 4 completions" in shown
    assert "reward masked" not in shown
    show(folder, 1, Wanted(task="no such"), side_by_side=True)
    assert "0 of 4 completions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "bounds"), [("0.5:1", (0.5, 1.0)), (":0", (None, 0.0)), ("-1:", (-1.0, None)), (":", (None, None))]
)
def test_reward_ranges(text: str, bounds: tuple[float | None, float | None]) -> None:
    assert reward_range(text) == bounds


@pytest.mark.parametrize("text", ["1", "a:b", "0.5-1"])
def test_other_reward_ranges_are_refused(text: str) -> None:
    with pytest.raises(ShowError, match="LOW:HIGH"):
        reward_range(text)


def test_metrics_leave_infra_out_of_the_reward_and_count_it() -> None:
    metrics = step_metrics(SAMPLED, STATS, {"sample": 2.0, "train": 1.0}, 1e-6)
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["pass_rate"] == pytest.approx(1 / 3)
    assert metrics["groups/mixed_share"] == 0.5
    assert metrics["sandbox/infra"] == 1
    assert metrics["completions/truncated_share"] == 0.25
    assert metrics["perf/tokens_per_second"] == pytest.approx(6 / 3)


def test_a_taken_name_gets_a_number_and_a_taken_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(create_folder(choose_folder(RECIPE, None))) for _ in range(3)] == [
        "runs/x",
        "runs/x-2",
        "runs/x-3",
    ]
    with pytest.raises(FolderError, match="runs/x"):
        choose_folder(RECIPE, "runs/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="file"):
        choose_folder(RECIPE, "file")


def test_the_exported_adapter_holds_every_factor(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from engine.train.lora import add_lora

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter = add_lora(model, ("q_proj", "down_proj"), rank=16, scale=2.0, seed=0)
    for _, b in adapter.factors().values():
        b.normal_()
    folder = export_adapter(tmp_path / "a", adapter.factors(), Lora(), Snapshot(str(tiny_model), tiny_model, "h"), 7)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(adapter.layers)
    for name, (a, b) in adapter.factors().items():
        assert torch.equal(tensors[f"base_model.model.{name}.lora_A.weight"], a)
        assert torch.equal(tensors[f"base_model.model.{name}.lora_B.weight"], b)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (
        16,
        32.0,
        ["down_proj", "q_proj"],
    )
    assert json.loads((folder / "training_info.json").read_text())["step"] == 7


def test_the_hash_of_tasks_takes_any_value_and_depends_on_the_tests_alone() -> None:
    from engine.record.manifest import hash_tasks
    from sandbox import CallCase, CallTests

    def task(result: object) -> Task:
        return Task("t", "a prompt with \ud800", CallTests("f", (CallCase((10**5000,), result),)))

    assert hash_tasks([task({"b", "a", "c"})]) == hash_tasks([task({"c", "b", "a"})])
    assert len({hash_tasks([task(r)]) for r in (1, True, 1.0, "1", [1], {1}, {1: 1}, None)}) == 8
