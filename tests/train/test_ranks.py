"""Two trainers compute what one does: any cut, uneven lengths, a rank without work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.recipe import Recipe
from engine.train.layout import Trained, pack
from engine.train.step import Trainer
from engine.types import Graded
from tests.train.test_step import MIXED, groups, recipe_for

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CASES: dict[str, dict[str, dict[str, object] | None]] = {
    "one micro-batch, so the second rank has none": {"train": {"token_budget": 4096}},
    "many micro-batches": {"train": {"token_budget": 64}},
    "sequence mean": {"loss": {"aggregate": "sequence"}, "train": {"token_budget": 64}},
    "gspo": {"loss": {"objective": "gspo"}, "train": {"token_budget": 64}},
    "two updates": {"optim": {"updates": 2, "lr": 1e-3}, "train": {"token_budget": 64}},
    "kl and entropy": {"loss": {"kl": 0.1, "entropy": 0.01}, "train": {"token_budget": 64}},
    "whole weights": {"lora": None, "full": {}, "sync": {"install": "merged"}, "train": {"token_budget": 64}},
    "sharded layers": {"train": {"token_budget": 64, "sharded": True}},
    "sharded layers, one micro-batch": {"train": {"token_budget": 4096, "sharded": True}, "optim": {"updates": 2}},
    "sharded layers, kept inputs, kl": {
        "train": {"token_budget": 64, "sharded": True, "checkpointing": True},
        "loss": {"kl": 0.1},
    },
    "no signal at all": {},
}


def recipe_of(name: str, world: int = 2) -> Recipe:
    """The case's recipe; for one trainer without shards."""
    sections = {key: dict(value) if value else value for key, value in CASES[name].items()}
    if world == 1 and sections.get("train"):
        sections["train"] = {k: v for k, v in (sections["train"] or {}).items() if k != "sharded"}
    return recipe_for(**sections)


def data_of(name: str) -> list[list[Graded]]:
    if name in ("one micro-batch, so the second rank has none", "sharded layers, one micro-batch"):
        return groups(MIXED)[:1]
    return groups([[0.5] * 4] * 3 if name == "no signal at all" else MIXED)


def stir(trainer: Trainer) -> None:
    """B starts at zero, and A has a gradient only where it is not."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in trainer.policy.trained.named_parameters.items():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.05, generator=generator)


def start(*arguments: str) -> list[subprocess.Popen[str]]:
    """Python twice, as two ranks that meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, text=True, env={**os.environ, **meeting, "RANK": str(rank)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ranks") / "found.pt"
    pair = start("-m", "tests.train.ranks_script", str(tiny_model), str(out))
    errors = [process.communicate(timeout=300)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], errors
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def alone(name: str, model: Path) -> tuple[Trainer, list[torch.Tensor | None], list[dict[str, Any]]]:
    """A trainer after two steps, the gradients of the first, and both steps' statistics."""
    trainer, data = Trainer(recipe_of(name, world=1), model), data_of(name)
    stir(trainer)
    stats = [asdict(trainer.step(data, trainer.advantages(data), 1))]
    gradients = [None if p.grad is None else p.grad.clone() for p in trainer.policy.trained.parameters]
    stats.append(asdict(trainer.step(data, trainer.advantages(data), 2)))
    return trainer, gradients, stats


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_weights_are_those_of_one_trainer(name: str, two: dict[str, Any], tiny_model: Path) -> None:
    trainer, gradients, stats = alone(name, tiny_model)
    found = two[name]
    assert [g is None for g in found["gradients"]] == [g is None for g in gradients]
    if gradients[0] is not None:
        ours, theirs = (torch.cat([g.flatten() for g in gs]).double() for gs in (found["gradients"], gradients))
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
    for ours, theirs in zip(found["parameters"], trainer.policy.trained.parameters, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found["stats"], stats, strict=True):
        for key, value in theirs.items():
            if key in ("loss", "grad_norm", "entropy", "kl", "mismatch_mean", "mismatch_max", "gen_kl", "ratio_min"):
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
            elif key in ("trained_tokens", "skipped", "non_finite", "clip_low_share", "clip_high_share"):
                assert ours[key] == value, key


def test_what_two_saved_one_goes_on_with(two: dict[str, Any], tiny_model: Path) -> None:
    name = "many micro-batches"
    trainer, *_ = alone(name, tiny_model)
    resumed = Trainer(recipe_of(name), tiny_model)
    resumed.restore(two[name]["state"])
    data = data_of(name)
    ours, theirs = (one.step(data, one.advantages(data), 3) for one in (resumed, trainer))
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)


MEET = """
import os, sys
from pathlib import Path
from engine.train.ranks import Ranks
from engine.train.step import Trainer
from tests.train.test_ranks import data_of, recipe_of

rank, name = int(os.environ["RANK"]), "many micro-batches"
ranks = Ranks(rank, 2)
trainer, data = Trainer(recipe_of(name), Path(sys.argv[1]), ranks), data_of(name)
print("there", flush=True)
sys.stdin.readline()
with ranks:
"""


@pytest.mark.parametrize(
    ("first", "killed"),
    [
        ("trainer.step(data, trainer.advantages(data), 1)", 1),
        ("trainer.step(data, trainer.advantages(data), 1)", 0),
        ("ranks.tell('step', data, trainer.advantages(data), 1); raise KeyboardInterrupt", None),
    ],
    ids=["the second is killed", "the first is killed", "the first gives up in the middle of a step"],
)
def test_a_rank_that_ends_ends_the_other_with_a_reason(first: str, killed: int | None, tiny_model: Path) -> None:
    pair = start("-c", MEET + f"    ranks.follow(trainer) if rank else exec({first!r})\n", str(tiny_model))
    for process in pair:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
    if killed is not None:
        pair[killed].send_signal(signal.SIGKILL)
        pair[killed].wait()
    said = {}
    for rank in (0, 1):
        if rank != killed:
            process = pair[rank]
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
    for rank in (0, 1):
        if rank != killed:
            said[rank] = pair[rank].communicate(timeout=120)[1]
    left = 1 if killed is None else 1 - killed
    assert pair[left].returncode == 1
    assert f"RunError: trainer {left} of 2 lost the others while" in said[left]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_micro_batches_come_in_multiples_where_there_is_enough_to_share(count: int) -> None:
    members = [Trained(g.completion, 1.0, n) for n, g in enumerate(i for row in groups(MIXED) for i in row)]
    batches = pack(members, 4096, multiple=count)
    assert len(batches) == min(count, 3)
    assert sorted(s for b in batches for s in set(b.sequences.tolist())) == list(range(12))
