"""Raw rows from a local file or from the hub. The libraries that this takes are imported when they are used."""

from __future__ import annotations

import difflib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.tasks.row import Rejected, wide_integers

INSTALL = "pip install 'rlvr[data]'"
BATCH = 256  # rows of a parquet file decoded at once


def file_rows(source: str, path: Path) -> Iterator[object]:
    """The rows of a .jsonl, .jsonl.gz or .parquet file; a line that isn't JSON is a Rejected. Raises InputError."""
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        near = f" (did you mean {path.with_name(close[0])}?)" if close else ""
        raise InputError(f"tasks source {source!r}: there is no file {path}{near}")
    if path.suffix == ".parquet":
        yield from _parquet_rows(source, path)
        return
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise InputError(f"tasks source {source!r}: {path} cannot be read: {error}") from None
    yield from json_lines(data)


def json_lines(data: bytes) -> Iterator[object]:
    """A row a line, blank lines passed over; a line that isn't JSON is a Rejected."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield _json_line(line, number)


def _json_line(line: bytes, number: int) -> object:
    try:
        with wide_integers():
            return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Rejected(f"line {number}", "not JSON", str(error)[:200])


def _parquet_rows(source: str, path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"tasks source {source!r}: reading parquet needs pyarrow: {INSTALL}") from None
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=BATCH):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"tasks source {source!r}: {path} cannot be read: {str(error).splitlines()[0]}") from None


def hub_rows(source: str, name: str, revision: str, config: str, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a data set on the hub. Code that comes with a data set is never run. Raises InputError."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"tasks source {source!r}: the hub needs the datasets library: {INSTALL}") from None
    try:
        loaded: Any = datasets.load_dataset(name, config or None, revision=revision)
    except Exception as error:  # the library and the hub's client raise many kinds; each means that there is no data
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"tasks source {source!r} could not be had from the hub: {reason}; without a network, download its files "
            "elsewhere and name them as file:path?format=..."
        ) from error
    splits = list(loaded)
    if not split and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        said = f"has no split {split!r}" if split else "has several splits"
        example = f"hf:{name}@{revision}:{config or 'default'}:{splits[0]}"
        raise InputError(f"tasks source {source!r} {said}: {', '.join(splits)}; write one, as in {example}")
    yield from loaded[split]
