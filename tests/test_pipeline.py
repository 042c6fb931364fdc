"""Sampling ahead of training: what may be under way, in which order groups come, and how errors travel."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from engine.errors import RunError
from engine.pipeline import Ahead, Finished, Pipeline
from engine.rollout.messages import Group, Sampling
from engine.types import Completion, Graded
from tests.conftest import completion, graded


class Echo:
    """Lands what it is told to land, in that order; stands where a sampler would."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.aborted: list[int] = []
        self.out: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()

    def submit(self, groups: Sequence[Group]) -> None:
        self.submitted += [group.group for group in groups]

    def abort(self, groups: Sequence[int]) -> None:
        self.aborted += groups

    def poll(self) -> Completion | None:
        try:
            item = self.out.get(timeout=0.02)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item


def group(number: int, size: int = 2) -> Group:
    return Group(number, f"task-{number}", (1, 2), tuple(range(size)), Sampling(4))


def answer(number: int, member: int, version: int = 0) -> Completion:
    return completion(number, member, (1, 2), (3, 4), version=version)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def grading() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def judge(item: Completion) -> Graded:
    return graded(item, float(item.member))


def test_groups_finish_as_they_land_and_members_stand_in_order(echo: Echo, grading: ThreadPoolExecutor) -> None:
    with closing(Pipeline(echo, lambda c: grading.submit(judge, c))) as pipeline:
        first, second = pipeline.submit([group(0), group(1)])
        for number, member in ((1, 1), (0, 0), (1, 0)):
            echo.out.put(answer(number, member))
        done = second.result(timeout=10)
        assert [g.completion.member for g in done.members] == [0, 1]
        assert not first.done()
        echo.out.put(answer(0, 1))
        assert {g.completion.group for g in first.result(timeout=10).members} == {0}


def test_a_sampler_s_error_reaches_every_group_and_the_next_submit(echo: Echo, grading: ThreadPoolExecutor) -> None:
    with closing(Pipeline(echo, lambda c: grading.submit(judge, c))) as pipeline:
        futures = pipeline.submit([group(0), group(1)])
        echo.out.put(RunError("the sampler is gone"))
        for future in futures:
            with pytest.raises(RunError, match="is gone"):
                future.result(timeout=10)
        with pytest.raises(RunError, match="is gone"):
            pipeline.submit([group(2)])


def test_a_grader_s_error_belongs_to_its_group(echo: Echo, grading: ThreadPoolExecutor) -> None:
    def judged(item: Completion) -> Graded:
        if item.group == 0:
            raise RunError("no jail")
        return judge(item)

    with closing(Pipeline(echo, lambda c: grading.submit(judged, c))) as pipeline:
        bad, good = pipeline.submit([group(0), group(1)])
        for number in (0, 1):
            for member in (0, 1):
                echo.out.put(answer(number, member))
        with pytest.raises(RunError, match="no jail"):
            bad.result(timeout=10)
        assert len(good.result(timeout=10).members) == 2


def test_what_is_aborted_never_comes(echo: Echo, grading: ThreadPoolExecutor) -> None:
    with closing(Pipeline(echo, lambda c: grading.submit(judge, c))) as pipeline:
        [future] = pipeline.submit([group(0)])
        echo.out.put(answer(0, 0))
        pipeline.abort()
        assert echo.aborted == [0]
        with pytest.raises(CancelledError):
            future.result(timeout=10)
        [other] = pipeline.submit([group(1)])
        for number, member in ((0, 1), (1, 0), (1, 1)):  # the first is a straggler of what was aborted
            echo.out.put(answer(number, member))
        assert len(other.result(timeout=10).members) == 2


class Instant:
    """Groups that are finished as soon as they are asked for, with the version at which they were."""

    def __init__(self) -> None:
        self.version = 0
        self.count = 0
        self.late: set[int] = set()
        """Numbers of groups that finish only when `land` is called."""
        self.open: dict[int, Future[Finished]] = {}

    def __call__(self, count: int) -> list[Future[Finished]]:
        futures: list[Future[Finished]] = []
        for _ in range(count):
            future: Future[Finished] = Future()
            made = Finished([judge(answer(self.count, m, self.version)) for m in (0, 1)], time.monotonic())
            if self.count in self.late:
                self.open[self.count] = future
                future.made = made  # type: ignore[attr-defined]
            else:
                future.set_result(made)
            futures.append(future)
            self.count += 1
        return futures

    def land(self, number: int) -> None:
        future = self.open.pop(number)
        future.set_result(future.made)  # type: ignore[attr-defined]


def numbers(taken: list[Finished]) -> list[int]:
    return [item.members[0].completion.group for item in taken]


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_no_group_is_older_than_allowed_and_every_one_is_trained_once(lag: int) -> None:
    source = Instant()
    ahead = Ahead(source, per_step=4, steps=6, max_lag=lag)
    seen: list[int] = []
    for version in range(6):
        source.version = version
        taken = ahead.take(4, version)
        assert source.count <= 4 * (version + 1 + lag)
        assert all(version - item.members[0].completion.version <= lag for item in taken)
        seen += numbers(taken)
    assert seen == list(range(24))
    assert (source.count, ahead.too_old) == (24, 0)


def test_a_straggler_lets_others_pass_and_is_dropped_when_it_is_too_old() -> None:
    source = Instant()
    source.late = {1}
    ahead = Ahead(source, per_step=2, steps=5, max_lag=1)
    assert numbers(ahead.take(2, 0)) == [0, 2]
    source.version = 1
    assert numbers(ahead.take(2, 1)) == [3, 4]
    source.version = 2
    source.land(1)
    assert numbers(ahead.take(2, 2)) == [5, 6]  # it was sampled at version 0: two behind
    assert ahead.too_old == 1
    taken: list[int] = []
    for source.version in (3, 4):
        taken += numbers(ahead.take(2, source.version))
    assert taken == [7, 8, 9, 10]


def test_discarded_groups_are_replaced() -> None:
    source = Instant()
    ahead = Ahead(source, per_step=2, steps=2, max_lag=1)
    assert numbers(ahead.take(2, 0)) == [0, 1]
    ahead.discard(1)
    assert numbers(ahead.take(1, 0)) == [2]
    assert numbers(ahead.take(2, 1)) == [3, 4]
    assert source.count == 5
