"""Checkpoints: what is saved comes back to the bit, what is not whole is found, and which stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError, RunError
from engine.record import checkpoint
from engine.record.checkpoint import NotWhole, kept, load, newest_whole, prune, save
from engine.record.lock import LockError, lock_folder
from engine.train.step import Trainer
from tests.train.test_step import MIXED, groups, perturbed, recipe_for

TENSORS = {"parameter.x": torch.tensor([1.0, float("nan"), -0.0]), "non_finite": torch.tensor(3)}
VALUES = {"groups": 17, "canaries": [[-0.1, -2.0000000000000004]], "again": []}


def export(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}


WAYS: dict[str, dict[str, dict[str, object] | None]] = {
    "lora": {},
    "full": {"lora": None, "full": {}},
    "bf16 full": {"model": {"source": "t", "dtype": "bfloat16"}, "lora": None, "full": {}},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_goes_on_to_the_bit(tiny_model: Path, tmp_path: Path, way: str) -> None:
    recipe = recipe_for(**WAYS[way])
    trainer = Trainer(recipe, tiny_model) if way != "lora" else perturbed(recipe, tiny_model)
    data = groups(MIXED)

    def step(one: Trainer, number: int) -> object:
        return one.step(data, one.advantages(data), number)

    for number in (1, 2):
        step(trainer, number)
    trainer._non_finite = 4
    torch.rand(3)
    path = save(tmp_path, 2, trainer.state(), VALUES, export)
    expected_random = torch.rand(3)
    other = Trainer(recipe, tiny_model)
    saved = load(path)
    other.restore(saved.tensors)
    assert torch.equal(torch.rand(3), expected_random)
    assert (saved.step, dict(saved.values)) == (2, {"format": 1, **VALUES})
    assert other._non_finite == 4
    weights = [t for ts in trainer.policy.trained.tensors().values() for t in ts]
    again = [t for ts in other.policy.trained.tensors().values() for t in ts]
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    assert any(name.startswith("exp_avg_sq.") for name in saved.tensors)
    want, found = step(trainer, 3), step(other, 3)
    assert (want.loss, want.grad_norm, want.entropy) == (found.loss, found.grad_norm, found.entropy)  # type: ignore[attr-defined]
    gradients = [p.grad for p in trainer.policy.trained.parameters]
    for ours, theirs in zip(gradients, [p.grad for p in other.policy.trained.parameters], strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
    after, restored = trainer.state(), other.state()
    del after["rng.cpu"], restored["rng.cpu"]
    assert bits(after) == bits(restored)


def test_a_checkpoint_of_another_model_is_refused_by_the_tensor(tiny_model: Path) -> None:
    trainer = Trainer(recipe_for(), tiny_model)
    state = trainer.state()
    state["parameter.model.layers.0.mlp.up_proj.lora_a"] = torch.zeros(2, 2)
    before = bits(trainer.state())
    with pytest.raises(InputError, match=r"up_proj.lora_a has shape \(2, 2\)"):
        trainer.restore(state)
    assert bits(trainer.state()) == before


def test_every_bit_comes_back_and_no_file_runs_code(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 7, TENSORS, VALUES, export)
    assert path.name == "step-000007"
    saved = load(path)
    assert bits(dict(saved.tensors)) == bits(TENSORS)
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert names == {"adapter/adapter_config.json", "manifest.json", "state.json", "state.safetensors"}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000007"]


@pytest.mark.parametrize("name", ["adapter/adapter_config.json", "manifest.json", "state.json", "state.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "shorter", "flipped"])
def test_what_is_not_whole_is_found_and_the_one_before_it_is_used(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 2, TENSORS, VALUES, export)
    file = save(tmp_path, 4, TENSORS, VALUES, export) / name
    data = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    elif harm == "shorter":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0x80
        file.write_bytes(data)
    with pytest.raises(NotWhole):
        load(tmp_path / "step-000004")
    said: list[str] = []
    saved = newest_whole(tmp_path, said.append)
    assert saved is not None
    assert saved.step == 2
    assert len(said) == 1
    assert "step-000004 is not whole" in said[0]
    assert {p.name for p in tmp_path.iterdir()} == {"step-000002", "step-000004.damaged"}


@given(at=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_any_flipped_bit_of_the_tensors_is_found(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    path = save(tmp_path_factory.mktemp("c"), 1, TENSORS, VALUES, export)
    data = bytearray((path / "state.safetensors").read_bytes())
    data[at % len(data)] ^= 1 << bit
    (path / "state.safetensors").write_bytes(data)
    with pytest.raises(NotWhole, match="other bytes"):
        load(path)


def test_a_half_written_and_a_half_removed_folder_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 2, TENSORS, VALUES, export)
    for name in ("step-000004.part", "step-000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    said: list[str] = []
    saved = newest_whole(tmp_path, said.append)
    assert saved is not None
    assert (saved.step, said) == (2, [])
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    assert newest_whole(tmp_path / "nowhere", said.append) is None


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2, TENSORS, VALUES, export)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(InputError, match="format 1"):
        newest_whole(tmp_path, print)


def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, 2, TENSORS, VALUES, export)

    def full(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left on device; the one of step 2 is whole"):
        save(tmp_path, 4, TENSORS, VALUES, full)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    assert load(tmp_path / "step-000002").step == 2


def test_a_full_disk_while_tensors_are_written(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        save(tmp_path, 2, TENSORS, VALUES, export)
        big = {"x": torch.zeros(1 << 17)}
        with pytest.raises(RunError, match="No space left"):
            save(tmp_path, 4, big, VALUES, export)
        assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
        assert load(tmp_path / "step-000002").step == 2
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@given(steps=st.sets(st.integers(1, 200)), keep=st.integers(1, 10), every=st.integers(0, 20))
def test_the_newest_stay_and_so_do_multiples(steps: set[int], keep: int, every: int) -> None:
    stay = kept(steps, keep, every)
    assert stay <= steps
    assert set(sorted(steps)[-keep:]) <= stay
    for step in steps - stay:
        assert not every or step % every
        assert sum(other > step for other in steps) >= keep
    assert len(stay) <= keep + (sum(step % every == 0 for step in steps) if every else 0)
    assert kept(stay, keep, every) == stay


def test_pruning_removes_the_others_only(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, TENSORS, VALUES, export)
    (tmp_path / "step-000003.damaged").mkdir()
    prune(tmp_path, 1, 10)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000003.damaged", "step-000010", "step-000020"}


def test_a_locked_folder_names_the_process_that_has_it(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        code = "import pathlib, sys; from engine.record.lock import lock_folder; lock_folder(pathlib.Path(sys.argv[1]))"
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 1
        assert f"process id {os.getpid()} is writing it" in done.stderr
        with pytest.raises(LockError):
            lock_folder(tmp_path)
    lock_folder(tmp_path).close()


def test_a_manifest_that_is_no_manifest_is_not_whole(tmp_path: Path) -> None:
    path = save(tmp_path, 2, TENSORS, VALUES, export)
    for text in ("", "[]", json.dumps({"step": 2}), "\0\0"):
        (path / "manifest.json").write_text(text)
        with pytest.raises(NotWhole):
            load(path)
