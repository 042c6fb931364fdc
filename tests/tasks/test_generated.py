from __future__ import annotations

import asyncio

import pytest

from engine.errors import InputError
from engine.tasks import Curriculum, load_tasks
from engine.tasks.generated import FAMILIES, SPLITS, generated
from engine.types import Task
from sandbox import Pool, StdinTests, Verdict


def everything() -> list[Task]:
    return [task for split in SPLITS for task in generated(split)]


def grade(programs: list[tuple[str, Task]]) -> list[Verdict]:
    async def run() -> list[Verdict]:
        async with Pool(2) as pool:
            return await asyncio.gather(*(pool.grade(program, task.tests) for program, task in programs))

    return asyncio.run(run())


def test_splits_do_not_overlap_and_new_families_are_new() -> None:
    ids = [task.id for task in everything()]
    assert len(ids) == len(set(ids))
    families = {split: {task.id.split("/")[1] for task in generated(split)} for split in SPLITS}
    assert families["train"] == families["heldout-parameters"]
    assert not families["train"] & families["heldout-families"]
    assert len(families["train"]) >= 30
    assert {family.level for family in FAMILIES} == {1, 2, 3}


def test_every_task_has_enough_cases_that_differ() -> None:
    for task in everything():
        assert isinstance(task.tests, StdinTests)
        assert len({case.input for case in task.tests.cases}) >= 8, task.id
        assert len({case.output for case in task.tests.cases}) >= 2, task.id


@pytest.mark.slow
def test_every_reference_passes_and_another_family_s_fails() -> None:
    tasks = everything()
    assert [v.verdict for v in grade([(str(t.reference), t) for t in tasks])] == ["AC"] * len(tasks)
    # The expressions differ, so no family's program may pass for another one's.
    first = {task.id.split("/")[1]: task for task in reversed(tasks)}
    names = list(first)
    crossed = [(str(first[a].reference), first[b]) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    assert "AC" not in [v.verdict for v in grade(crossed)]


def test_curriculum_takes_every_task_once_an_epoch_and_goes_on_from_its_cursor() -> None:
    tasks = load_tasks("generated:train")
    straight = Curriculum(tasks, seed=3).take(3 * len(tasks))
    assert all({t.id for t in straight[i : i + len(tasks)]} == {t.id for t in tasks} for i in (0, len(tasks)))
    first = Curriculum(tasks, seed=3)
    taken = first.take(len(tasks) + 5)
    resumed = Curriculum(tasks, seed=3, epoch=first.epoch, position=first.position)
    assert [t.id for t in taken + resumed.take(40)] == [t.id for t in straight[: len(tasks) + 45]]
    assert [t.id for t in Curriculum(tasks, seed=4).take(20)] != [t.id for t in straight[:20]]


@pytest.mark.parametrize("source", ["generated:tran", "kodcode", "generated"])
def test_an_unknown_source_is_refused_with_the_known_ones(source: str) -> None:
    with pytest.raises(InputError, match="train"):
        load_tasks(source)
