"""Sampling by strata, and splits in which no part holds a near-duplicate of another's task."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import InputError
from engine.tasks.duplicates import Clusters
from engine.types import Task

TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A task that is in no part, because it is near to one that is."""

    id: str
    near: str
    part: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Split:
    """The parts, each in the source's order; what was left out as a near-duplicate; how many else were not chosen."""

    parts: Mapping[str, tuple[Task, ...]]
    duplicates: tuple[Duplicate, ...]
    not_chosen: int


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of `count` each stratum gives: in proportion to its size, the rest to the largest remainders.

    Raises ValueError where there are fewer than `count` in all.
    """
    total = sum(sizes.values())
    if not 0 <= count <= total:
        raise ValueError(f"{count} of {total}")
    exact = {name: count * size / total if total else 0.0 for name, size in sizes.items()}
    given = {name: int(value) for name, value in exact.items()}
    order = sorted(sizes, key=lambda name: (given[name] - exact[name], name))
    for name in order[: count - sum(given.values())]:
        given[name] += 1
    return given


def stratified(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """`count` of the tasks, from each source in proportion; in their order. Raises ValueError where there are fewer."""
    chosen = _choose(list(range(len(tasks))), tasks, count, random.Random(f"sample/{seed}"))
    return [tasks[place] for place in sorted(chosen)]


def split(
    tasks: Sequence[Task], clusters: Clusters, heldout: Mapping[str, int], *, seed: int, train: int | None = None
) -> Split:
    """Cut tasks into the held-out parts, of the sizes that are asked for, and `train`, which is the rest.

    Of every cluster one task at most is in one part: its first; the others are near-duplicates and in no part. Parts
    have their sources in proportion. train: at most so many. Raises InputError where there are too few tasks.
    """
    members = clusters.members()
    left = list(members)
    rng = random.Random(f"split/{seed}")
    places: dict[str, list[int]] = {}
    for name, count in heldout.items():
        if name == TRAIN:
            raise InputError(f"a held-out part can't be called {TRAIN}")
        if count > len(left):
            raise InputError(f"{name}: {count} tasks are asked for, {len(left)} without near-duplicates are there")
        places[name] = sorted(_choose(left, tasks, count, rng))
        taken = set(places[name])
        left = [first for first in left if first not in taken]
    if train is not None and train > len(left):
        raise InputError(f"{TRAIN}: {train} tasks are asked for, {len(left)} without near-duplicates are left")
    places[TRAIN] = left if train is None else sorted(_choose(left, tasks, train, rng))
    duplicates = tuple(
        Duplicate(tasks[other].id, tasks[first].id, name, round(clusters.similarity(first, other), 4))
        for name, firsts in places.items()
        for first in firsts
        for other in members[first][1:]
    )
    parts = {name: tuple(tasks[first] for first in firsts) for name, firsts in places.items()}
    return Split(parts, duplicates, len(tasks) - len(duplicates) - sum(map(len, parts.values())))


def _choose(places: Sequence[int], tasks: Sequence[Task], count: int, rng: random.Random) -> list[int]:
    strata: dict[str, list[int]] = defaultdict(list)
    for place in places:
        strata[tasks[place].source].append(place)
    given = shares({name: len(found) for name, found in strata.items()}, count)
    return [place for name in sorted(strata) for place in rng.sample(strata[name], given[name])]
