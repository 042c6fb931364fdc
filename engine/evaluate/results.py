"""A result on disk: protocol.json says how it was made, results.jsonl holds every answer, and a run may go on in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.types import Answer

PROTOCOL, ANSWERS, SUITES = "protocol.json", "results.jsonl", "summary.json"


@dataclass(frozen=True, slots=True)
class Protocol:
    """Everything that a result depends on. Results are comparable where all but `model` is the same."""

    model: Mapping[str, Any]
    """What was evaluated: source, its sha256, the adapter's step and sha256."""
    suites: Mapping[str, Mapping[str, Any]]
    """By name: the source, how many tasks it has and their sha256."""
    settings: Mapping[str, Any]
    """Prompt, sampling and limits, by dotted name."""


class Results:
    """The folder of one evaluation, open for more answers; each is on disk when `add` returns."""

    def __init__(self, folder: Path, protocol: Protocol) -> None:
        """Opens `folder`, or makes it. Raises InputError where it holds the result of another protocol."""
        self.folder = folder
        self._answers: dict[str, dict[tuple[str, int], Answer]] = {suite: {} for suite in protocol.suites}
        now = _plain(asdict(protocol))
        if (folder / PROTOCOL).exists():
            _refuse_another(folder, read_protocol(folder), now)
            for suite, answer in _read(folder / ANSWERS, mend=True):
                self._answers[suite][answer.task_id, answer.sample] = answer
        elif folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder}: it holds something that is no evaluation; name a new or empty folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PROTOCOL).write_text(json.dumps(now, indent=2, ensure_ascii=False) + "\n")
        self._file = (folder / ANSWERS).open("a", encoding="utf-8")

    def add(self, suite: str, answer: Answer) -> None:
        """Keep an answer. INFRA is not kept: it says nothing of the model, and the next run asks again."""
        if answer.verdict == "INFRA":
            return
        self._answers[suite][answer.task_id, answer.sample] = answer
        self._file.write(json.dumps({"suite": suite, **asdict(answer)}) + "\n")
        self._file.flush()

    def has(self, suite: str, task_id: str, sample: int) -> bool:
        """Whether this answer is there."""
        return (task_id, sample) in self._answers[suite]

    def answers(self, suite: str) -> list[Answer]:
        """All that there are of a suite."""
        return list(self._answers[suite].values())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_protocol(folder: Path) -> dict[str, Any]:
    """protocol.json as dicts. Raises InputError where the folder is no evaluation."""
    try:
        protocol = json.loads((folder / PROTOCOL).read_text())
    except FileNotFoundError:
        raise InputError(f"{folder}: no evaluation is there (it has no {PROTOCOL}); rlvr eval makes one") from None
    except ValueError as error:
        raise InputError(f"{folder / PROTOCOL}: not valid JSON: {error}") from None
    return dict(protocol)


def read_answers(folder: Path) -> dict[str, list[Answer]]:
    """Every answer of a folder, by suite. Raises InputError for a folder that is no evaluation."""
    answers: dict[str, list[Answer]] = {suite: [] for suite in read_protocol(folder)["suites"]}
    for suite, answer in _read(folder / ANSWERS):
        answers[suite].append(answer)
    return answers


def differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys at which two protocols differ, each with both values."""
    found = []
    for key in dict.fromkeys((*one, *other)):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} ({a!r} there, {b!r} now)")
    return found


def _refuse_another(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    found = differing(there, now)
    if found:
        raise InputError(
            f"{folder}: its answers were made with other settings, which can't be mixed: {'; '.join(found[:4])}. "
            "Name another folder with --out"
        )


def _read(path: Path, *, mend: bool = False) -> Iterator[tuple[str, Answer]]:
    """The answers in a file; the last line may be half written by a run that was killed. mend: cut that off."""
    if not path.exists():
        return
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if mend and len(kept) < len(whole):
        path.write_bytes(kept)
    for number, line in enumerate(kept.decode("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            yield row.pop("suite"), Answer(**row)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}, line {number}: no answer: {error}") from None


def _plain(value: Any) -> Any:
    """As JSON gives it back, so that what is compared is alike."""
    return json.loads(json.dumps(value))
