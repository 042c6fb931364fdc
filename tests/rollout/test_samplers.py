"""Two real samplers with a tiny model, and every way of losing one of them or some of its messages."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.rollout import SamplerError, SamplerLost, Samplers, children
from engine.rollout.messages import Landed
from engine.sync import CollectiveTensors, SharedTensors
from engine.types import Completion
from tests.rollout.tiny import SCALE, config, factors, group, load, logprobs, make_model, merged

pytestmark = pytest.mark.slow
HANG_SECONDS = 10.0
"""More than a fresh sampler's first engine step takes where other work has both cores."""
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("samplers") / "model")


@pytest.fixture(scope="module")
def memory(folder: Path) -> Iterator[SharedTensors]:
    shapes = {name: (a.shape, b.shape) for name, (a, b) in factors(load(folder), 0).items()}
    shared = SharedTensors(shapes, SCALE)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def two(folder: Path, memory: SharedTensors) -> Iterator[Samplers]:
    """Bound, with the factors of seed 1 installed as version 1."""
    configs = [config(folder), config(folder)]
    logs = [folder.parent / f"sampler-{i}.log" for i in range(2)]
    samplers = Samplers(configs, children(configs, threads=1, logs=logs), hang_seconds=HANG_SECONDS)
    samplers.wait_ready()
    assert samplers.bind(memory) == 10
    samplers.install(1, factors(load(folder), 1))
    yield samplers
    samplers.close()


def by_member(completions: list[Completion]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Token ids by group and member, each of which must be there once."""
    found = {(c.group, c.member): c.token_ids for c in completions}
    assert len(found) == len(completions)
    return found


def worst_gap(completions: list[Completion], folder: Path, seed: int) -> float:
    model = merged(folder, factors(load(folder), seed))
    gaps = []
    for c in completions:
        expected = logprobs(model, (*c.prompt_ids, *c.token_ids))[len(c.prompt_ids) - 1 :]
        gaps += [abs(a - b) for a, b in zip(c.logprobs, expected, strict=True)]
    return max(gaps)


def test_groups_land_from_both_samplers_alike_whatever_the_placement(two: Samplers, folder: Path) -> None:
    groups = [group(number, 4) for number in range(6)]
    before = [s.completions for s in two.stats()]
    two.submit(groups)
    assert [s.unfinished for s in two.stats()] == [12, 12]
    first = list(two.landed(24))
    assert [s.completions - b for s, b in zip(two.stats(), before, strict=True)] == [12, 12]
    assert {c.version for c in first} == {1}
    assert worst_gap(first, folder, 1) < CLOSE
    two.submit(groups[::-1])  # so that each group goes to the other sampler
    assert by_member(list(two.landed(24))) == by_member(first)
    two.submit([group(90, 1, tokens=5), group(91, 9, tokens=5), group(92, 1, tokens=5), group(93, 1, tokens=5)])
    assert [s.unfinished for s in two.stats()] == [3, 9]  # whole groups, to whoever owes least
    list(two.landed(12))
    scores = two.scores(tuple(range(40)))
    assert scores.keys() == {0, 1}
    assert scores[0] == scores[1]
    with pytest.raises(ValueError, match="group 7 "):
        two.submit([group(7, 1), group(7, 1)])
    two.abort([7])


def test_an_aborted_group_lands_no_more(two: Samplers) -> None:
    two.submit([group(10, 4, tokens=300), group(11, 4), group(12, 4, tokens=300)])
    two.abort([10, 12])
    assert {c.group for c in two.landed(4)} == {11}
    assert [s.unfinished for s in two.stats()] == [0, 0]
    with pytest.raises(SamplerLost, match="waited 1 s for completion 1 of 1; sampler 0 on cpu owes nothing"):
        list(two.landed(1, deadline_seconds=1.0))


def test_a_completion_that_is_lost_on_the_way_is_sampled_again(two: Samplers) -> None:
    two.submit([group(20, 4)])
    expected = by_member(list(two.landed(4)))
    two.submit([group(20, 4)])
    while not isinstance(two._inbox.get(timeout=60)[1], Landed):
        pass
    assert by_member(list(two.landed(4))) == expected
    assert sum(s.resampled for s in two.stats()) == 1


def test_a_killed_sampler_is_replaced_with_the_weights_of_now_and_what_it_owed_is_sampled_again(
    two: Samplers, folder: Path
) -> None:
    groups = [group(30, 4, tokens=20), *(group(number, 4, tokens=200) for number in (31, 32, 33))]
    two.submit(groups)
    expected = by_member(list(two.landed(16)))
    two.submit(groups)
    landed = [next(two.landed(1))]
    os.kill(two.pids[0], signal.SIGKILL)
    short_lived = threading.Thread(target=lambda: landed.extend(two.landed(15)))
    short_lived.start()
    short_lived.join()
    assert by_member(landed) == expected
    assert all(Path(f"/proc/{pid}").exists() for pid in two.pids)  # the thread's end is not the new sampler's
    assert worst_gap(landed, folder, 1) < CLOSE
    two.wait_ready()
    assert [s.restarts for s in two.stats()] == [1, 0]


def test_a_sampler_that_hangs_is_found_and_replaced(two: Samplers, folder: Path) -> None:
    """Although the other one is never silent."""
    hanging = two.pids[1]
    os.kill(hanging, signal.SIGSTOP)
    two.submit([group(40, 4), group(41, 4)])
    start = time.monotonic()
    landed: list[Completion] = []
    number = 2000
    while len(landed) < 8:
        assert time.monotonic() - start < 8 * HANG_SECONDS
        two.submit([group(number, 1, tokens=1)])
        number += 1
        for completion in two.landed(1):
            landed += [completion] if completion.group in (40, 41) else []
    two.abort(range(2000, number))
    assert time.monotonic() - start > HANG_SECONDS
    assert {c.version for c in landed} == {1}
    assert len(by_member(landed)) == 8
    assert worst_gap(landed, folder, 1) < CLOSE
    assert not Path(f"/proc/{hanging}").exists()
    assert two.stats()[1].restarts == 1
    two.wait_ready()


def test_a_sampler_that_dies_before_an_install_is_replaced_by_it(two: Samplers, folder: Path) -> None:
    os.kill(two.pids[0], signal.SIGKILL)
    two.install(2, factors(load(folder), 2))
    two.submit([group(50, 4), group(51, 4)])
    landed = list(two.landed(8))
    assert {c.version for c in landed} == {2}
    assert worst_gap(landed, folder, 2) < CLOSE
    two.wait_ready()


def test_a_sampler_that_replaces_another_is_proved_before_it_samples(two: Samplers) -> None:
    proved: list[int] = []
    heard: list[tuple[float, ...]] = []

    def check(number: int, logprobs: tuple[float, ...]) -> float:
        proved.append(number)
        heard.append(logprobs)
        return float(number)

    assert two.prove(tuple(range(30)), check) == 1.0
    os.kill(two.pids[1], signal.SIGKILL)
    two.submit([group(52, 4), group(53, 4)])
    assert len(by_member(list(two.landed(8)))) == 8
    two.wait_ready()
    assert proved == [0, 1, 1]
    assert heard[0] == heard[1] == heard[2]


def test_a_broadcast_reaches_every_sampler_and_the_one_that_replaces_another(
    two: Samplers, folder: Path, memory: SharedTensors
) -> None:
    shapes = {name: (a.shape, b.shape) for name, (a, b) in factors(load(folder), 0).items()}
    with closing(CollectiveTensors(shapes, SCALE)) as sent:
        assert two.bind(sent) == 10
        for version, seed in ((3, 5), (4, 6)):
            assert set(two.install(version, factors(load(folder), seed))) == {"fetch", "write", "kv"}
            two.submit([group(55, 2), group(56, 2)])
            assert worst_gap(list(two.landed(4)), folder, seed) < CLOSE
        restarts = two.stats()[1].restarts
        os.kill(two.pids[1], signal.SIGKILL)  # the other one is sent home, and has it alone
        two.install(5, factors(load(folder), 5))
        assert two.stats()[1].restarts == restarts + 1
        two.wait_ready()
        two.install(6, factors(load(folder), 5))  # and both are in one group again
        two.submit([group(57, 2), group(58, 2)])
        landed = list(two.landed(4))
        assert {c.version for c in landed} == {6}
        assert worst_gap(landed, folder, 5) < CLOSE
    two.bind(memory)


def test_log_probs_that_are_no_numbers_stop_the_run(two: Samplers, folder: Path) -> None:
    broken = factors(load(folder), 1)
    name, (a, b) = next(iter(broken.items()))
    two.install(7, {**broken, name: (a, torch.full_like(b, torch.nan))})
    two.submit([group(60, 1)])
    with pytest.raises(SamplerError, match=r"group 60, member 0 \(task task-60\).*token 0 of 24 the log-prob nan"):
        list(two.landed(1))
    two.abort([60])
    two.install(8, factors(load(folder), 1))


def test_a_sampler_that_can_not_be_started_again_ends_the_run_with_the_reason(two: Samplers, folder: Path) -> None:
    """The last one of these samplers: their model is gone."""
    (folder / "config.json").rename(folder / "config.away")
    os.kill(two.pids[0], signal.SIGKILL)

    def sample_on() -> None:
        """The other one goes on meanwhile."""
        for number in range(1000, 3000):
            two.submit([group(number, 4)])
            list(two.landed(4))

    with pytest.raises(SamplerError, match="the sampler failed at loading its model"):
        sample_on()
