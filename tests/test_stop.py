"""Signals that stop a run, and what may differ when it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine import recipe_file as recipes
from engine.errors import InputError
from engine.pipeline import Ahead, Finished
from engine.recipe import Recipe
from engine.record.folder import FolderError
from engine.resume import check_recipe
from engine.stop import Stop, Stopped
from engine.tasks import Curriculum
from engine.types import Task
from sandbox import StdinTests


def recipe(**run: object) -> Recipe:
    return recipes.parse(
        {
            "run": {"name": "x", "steps": 3, **run},
            "model": {"source": "somewhere"},
            "tasks": {"train": "generated:train"},
        }
    )


@pytest.fixture
def stop() -> Iterator[Stop]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Stop() as entered:
            yield entered
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def strike(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two instructions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_for_the_end_of_the_step(stop: Stop, number: int) -> None:
    stop.check()
    strike(number)
    strike(signal.SIGTERM)  # may be said twice
    with pytest.raises(Stopped):
        stop.check()
    with pytest.raises(Stopped), stop.at_once():
        pytest.fail("nothing new is begun")


def test_the_second_ctrl_c_ends_at_once(stop: Stop) -> None:
    strike(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        strike(signal.SIGINT)


def test_what_can_be_given_up_is_given_up(stop: Stop) -> None:
    def evaluate() -> None:
        with stop.at_once():
            strike(signal.SIGTERM)
            pytest.fail("it went on")

    with pytest.raises(Stopped):
        evaluate()


def test_a_recipe_may_differ_where_it_is_allowed(tmp_path: Path) -> None:
    check_recipe(tmp_path, recipe(), [])  # nothing there yet
    (tmp_path / "recipe.toml").write_text(recipes.dump(recipe()))
    check_recipe(tmp_path, recipe(), ["run.steps"])
    with pytest.raises(FolderError, match=r"run.seed was 0, is 7; run.steps was 3, is 9"):
        check_recipe(tmp_path, recipe(steps=9, seed=7), [])
    with pytest.raises(FolderError, match=r"recipe: run.seed was 0, is 7; go on"):
        check_recipe(tmp_path, recipe(steps=9, seed=7), ["run.steps"])
    check_recipe(tmp_path, recipe(steps=9, seed=7), ["run.steps", "run.seed"])
    check_recipe(tmp_path, recipe(steps=9, seed=7), ["run"])
    with pytest.raises(InputError, match=r"no \[runs\]"):
        check_recipe(tmp_path, recipe(), ["runs.steps"])


def test_tasks_that_came_back_come_first() -> None:
    tasks = [Task(str(i), "", StdinTests(())) for i in range(5)]
    whole = [task.id for task in Curriculum(tasks, 0).take(9)]
    first = Curriculum(tasks, 0)
    flying = first.take(4)[1:]
    second = Curriculum(tasks, 0, first.epoch, first.position, list(flying))
    assert whole[:1] + [task.id for task in (*second.take(2), *second.take(6))] == whole


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_sampling_ahead_goes_on_where_it_was(max_lag: int) -> None:
    """As many groups are under way at a version as in a run that was not killed."""

    def under_way(start: int) -> list[int]:
        submitted: list[int] = []

        def submit(count: int) -> list[Future[Finished]]:
            submitted.append(count)
            futures: list[Future[Finished]] = [Future() for _ in range(count)]
            for future in futures:
                future.set_result(Finished([], 0.0))
            return futures

        ahead = Ahead(submit, per_step=4, steps=6, max_lag=max_lag, version=start)
        counts = []
        for version in range(start, 6):
            ahead.fill(version)
            counts.append(len(ahead.untaken))
            for future in ahead.untaken[:4]:
                ahead._queue.remove(future)
        assert sum(submitted) == 4 * (6 - start)
        return counts

    assert under_way(3) == under_way(0)[3:]
