"""The data set formats, by the names that a source gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.tasks.apps import read_apps, read_taco
from engine.tasks.cases import Reading
from engine.tasks.deepcoder import read_deepcoder
from engine.tasks.humaneval import read_humaneval
from engine.tasks.kodcode import read_kodcode
from engine.tasks.livecodebench import read_livecodebench
from engine.tasks.mbpp import read_mbpp
from engine.tasks.own import read_own
from engine.tasks.row import BadRow, Rejected, Row
from engine.tasks.verifiable import read_verifiable
from engine.types import Task


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of rows.

    read: raises BadRow. prompts: the prompt styles that it knows, its own first. cases: whether it can leave out
    examples and bound the number of cases; other formats have their tests as one piece of code, or exactly as meant.
    """

    read: Callable[[Row, Reading], Task]
    prompts: tuple[str, ...]
    cases: bool = False


_STYLES = ("instruct", "livecodebench", "statement")

FORMATS: Mapping[str, Format] = {
    "rlvr": Format(read_own, ()),
    "kodcode": Format(read_kodcode, ("instruct", "statement")),
    "verifiable": Format(read_verifiable, _STYLES, cases=True),
    "deepcoder": Format(read_deepcoder, ("livecodebench", "instruct", "statement"), cases=True),
    "apps": Format(read_apps, _STYLES, cases=True),
    "taco": Format(read_taco, _STYLES, cases=True),
    "livecodebench": Format(read_livecodebench, ("livecodebench", "instruct", "statement"), cases=True),
    "humaneval": Format(read_humaneval, ("evalplus", "complete")),
    "mbpp": Format(read_mbpp, ("instruct", "statement"), cases=True),
}

PUBLISHED: Mapping[str, str] = {
    "KodCode/KodCode-V1": "kodcode",
    "KodCode/KodCode-Light-RL-10K": "kodcode",
    "open-r1/verifiable-coding-problems-python": "verifiable",
    "PrimeIntellect/verifiable-coding-problems": "verifiable",
    "agentica-org/DeepCoder-Preview-Dataset": "deepcoder",
    "codeparrot/apps": "apps",
    "BAAI/TACO": "taco",
    "livecodebench/code_generation_lite": "livecodebench",
    "openai/openai_humaneval": "humaneval",
    "evalplus/humanevalplus": "humaneval",
    "google-research-datasets/mbpp": "mbpp",
    "evalplus/mbppplus": "mbpp",
}
"""The formats of data sets on the hub that need no `format=`."""

_NAMES = ("id", "task_id", "question_id", "problem_id", "conversation_id", "uid", "name")


def read_row(kind: str, row: object, how: Reading, number: int = 0) -> Task | Rejected:
    """A row of format `kind` as a task, or why it gives none. Never raises on a row, whatever it holds.

    number: the row's place, which names it where it has no name of its own.
    """
    if not isinstance(row, Mapping):
        return Rejected(f"row {number}", "not an object", type(row).__name__)
    try:
        return FORMATS[kind].read(row, how)
    except BadRow as error:
        return Rejected(_name(row, number), error.reason, error.detail)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        # A field of a type that no reader looks for: data sets are of all kinds, and one row must not stop the others.
        return Rejected(_name(row, number), "malformed", f"{type(error).__name__}: {str(error)[:200]}")


def _name(row: Row, number: int) -> str:
    found = next((row[key] for key in _NAMES if isinstance(row.get(key), (str, int)) and row[key] != ""), None)
    return f"row {number}" if found is None else f"row {number} ({str(found)[:80]})"
