"""From the cases of a row to tests: inputs and outputs in their many spellings, examples left out, limits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.tasks.row import BadRow, embedded, lf, wide_integers
from sandbox import CallCase, CallTests, Limits, StdinCase, StdinTests

PYTHON_FACTOR = 2.0  # time limits are made for compiled languages
MAX_SECONDS = 10.0
MEMORY = (256, 1024)  # MiB


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read.

    cases: `hidden` leaves out the examples that the statement shows, `all` keeps them. max_cases: at most so many,
    always the same ones of a task; 0 is no bound. min_cases: a row with fewer is no task. prompt: a style of
    `engine.tasks.prompt`; empty is the format's own. label: a part of the tasks' source, such as the data set's
    configuration.
    """

    cases: Literal["hidden", "all"] = "hidden"
    max_cases: int = 0
    min_cases: int = 1
    prompt: str = ""
    label: str = ""


DEFAULT = Reading()
Pair = tuple[Any, Any]


def stdin_tests(pairs: Sequence[Pair], statement: str, name: str, how: Reading) -> StdinTests:
    """Tests from inputs and outputs, each a text or a list of lines. Raises BadRow."""
    cases = list(dict.fromkeys(StdinCase(_stdin_text(given), _stdin_text(wanted)) for given, wanted in pairs))
    _some(cases)
    if not any(case.output.strip() for case in cases):
        raise BadRow("every expected output is empty")
    lines = _lines(statement)
    hidden = [case for case in cases if how.cases == "all" or not _shown(case, lines)]
    return StdinTests(tuple(chosen(_enough(hidden, how), name, how.max_cases)))


def call_tests(entry_point: str, pairs: Sequence[Pair], statement: str, name: str, how: Reading) -> CallTests:
    """Tests from arguments and results. Raises BadRow."""
    if not entry_point:
        raise BadRow("no entry point")
    cases = [CallCase(tuple(args), result) for args, result in pairs]
    _some(cases)
    lines = statement.split("\n")
    hidden = [case for case in cases if how.cases == "all" or not _shown_call(case, entry_point, lines)]
    return CallTests(entry_point, tuple(chosen(_enough(hidden, how), name, how.max_cases)))


def paired(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Pair]:
    """Inputs with their outputs. Raises BadRow where their numbers differ."""
    if len(inputs) != len(outputs):
        raise BadRow("inputs and outputs differ in number", f"{len(inputs)} and {len(outputs)}")
    return list(zip(inputs, outputs, strict=True))


def listed_calls(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Pair]:
    """APPS's and TACO's calls: a list of arguments each, and results that may all stand in a list of one.

    Which of the two a row means can't be seen for functions that return lists of one; `gold` tries the other one too.
    """
    pairs = []
    for given, wanted in paired(inputs, outputs):
        args = embedded(given, "an input") if isinstance(given, str) else given
        if not isinstance(args, (list, tuple)):
            raise BadRow("a field cannot be read", "a call's input must be a list of arguments")
        pairs.append((args, wanted))
    if pairs and all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in pairs):
        pairs = [(args, wanted[0]) for args, wanted in pairs]
    return pairs


def line_calls(pairs: Sequence[Pair]) -> list[Pair]:
    """LiveCodeBench's calls: a JSON value a line for the arguments, a JSON value for the result. Raises BadRow."""
    return [
        (
            [embedded(line, "an argument") for line in lf(str(given)).split("\n") if line.strip()],
            embedded(wanted, "a result"),
        )
        for given, wanted in pairs
    ]


def limits_of(seconds: object, megabytes: object = None) -> Limits | None:
    """A task's limits from its data set's: numbers, or text as `2.5 seconds`, `256 megabytes`. None if there is none.

    Twice the time, for Python, and at most 10 s of CPU; between 256 MiB and 1 GiB.
    """
    limit = _number(seconds)
    if limit <= 0:
        return None
    memory = int(min(MEMORY[1], max(MEMORY[0], _number(megabytes))))
    return Limits(cpu_seconds=min(MAX_SECONDS, PYTHON_FACTOR * limit), memory_mb=memory)


def _number(value: object) -> float:
    if isinstance(value, str):
        found = re.match(r"\s*(\d+(?:\.\d+)?)", value)
        return float(found[1]) if found else 0.0
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0


def _stdin_text(value: Any) -> str:
    """An input or an output: text as it is, other values as they would be printed, a list as its lines."""
    if isinstance(value, str):
        return lf(value)
    if isinstance(value, (list, tuple)):
        return "".join(f"{_line(item)}\n" for item in value)
    return f"{_line(value)}\n"


def _line(value: Any) -> str:
    if isinstance(value, str):
        return lf(value).rstrip("\n")
    if isinstance(value, (list, tuple)):
        return " ".join(_line(item) for item in value)
    if isinstance(value, (bool, int, float)):
        with wide_integers():
            return str(value)
    raise BadRow("a field cannot be read", f"a case holds a {type(value).__name__}, which is neither text nor number")


def _some(cases: Sequence[object]) -> None:
    if not cases:
        raise BadRow("no cases")


def _enough(cases: list[Any], how: Reading) -> list[Any]:
    if not cases:
        raise BadRow("no hidden case", "the statement shows every one")
    if len(cases) < how.min_cases:
        raise BadRow("too few cases", str(len(cases)))
    return cases


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _shown(case: StdinCase, statement: list[str]) -> bool:
    """Whether the statement has the input and, behind it, the output as whole lines: then it is an example."""
    given, wanted = _lines(case.input), _lines(case.output)
    if not given or not wanted:
        return False
    places = _places(given, statement)
    return any(_places(wanted, statement[place + len(given) :]) for place in places)


def _places(block: list[str], lines: list[str]) -> list[int]:
    first = block[0]
    return [i for i, line in enumerate(lines) if line == first and lines[i : i + len(block)] == block]


def _shown_call(case: CallCase, entry_point: str, statement: list[str]) -> bool:
    """Whether a line that calls the function or begins with `Input` has the arguments, with the result near by."""
    args, result = [_squeezed(arg) for arg in case.args], _squeezed(case.result)
    if not args or not result:
        return False
    for number, line in enumerate(statement):
        if entry_point not in line and not line.lstrip().lower().startswith(("input", ">>>", "**input")):
            continue
        behind = _behind(args, _squeezed_text(line))
        if behind is None:
            continue
        near = behind + "\n" + "\n".join(_squeezed_text(other) for other in statement[number + 1 : number + 4])
        if _behind([result], near) is not None:
            return True
    return False


def _behind(wanted: list[str], line: str) -> str | None:
    """What stands behind all of `wanted`, found one after the other as whole values; None if they are not there."""
    for value in wanted:
        found = re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w.])", line) if value in line else None
        if found is None:
            return None
        line = line[found.end() :]
    return line


def _squeezed(value: object) -> str:
    with wide_integers():
        return _squeezed_text(repr(value))


def _squeezed_text(text: str) -> str:
    """Without blanks, with one kind of quotes and of brackets, and JSON's words as Python's."""
    text = re.sub(r"\s+", "", text).replace('"', "'").replace(",)", ")")
    return text.replace("true", "True").replace("false", "False").replace("null", "None")


def chosen(cases: list[Any], name: str, count: int) -> list[Any]:
    """At most `count` cases, which ones following from the task's name and their number alone, in their order."""
    if not count or len(cases) <= count:
        return cases

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{name}/{index}".encode("utf-8", "surrogatepass")).digest()

    return [cases[index] for index in sorted(sorted(range(len(cases)), key=rank)[:count])]
