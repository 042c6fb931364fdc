"""vLLM's asynchronous engine, as CUDA uses it, on a CPU: in the same class, by the same calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.rollout import SamplerError, SamplerLost
from tests.rollout.tiny import RANK, factors, group, load, merged
from tests.small import below, gone
from tests.sync.into_vllm import CLOSE, FAR, Bench, bench, check_install_in_the_middle, gaps

pytestmark = pytest.mark.slow
LEAVES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module", params=["merged", "adapter"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def opened(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """`merged` is split over two workers, which share the head of keys and values; `adapter` is vLLM's core alone."""
    changes = {"lora_rank": RANK, "lora_targets": LEAVES} if kind == "adapter" else {"tensor_parallel": 2}
    with bench(tmp_path_factory.mktemp(kind), engine="async", install=kind, **changes) as made:
        yield made


def test_factors_are_exact_each_time_and_gone_with_the_next(opened: Bench) -> None:
    base = load(opened.folder)
    assert opened.gap(base) < CLOSE
    assert opened.bind(factors(base, 0)) == 10
    for version, seed in enumerate((1, 2, 1), start=1):
        new = factors(base, seed)
        assert set(opened.install(new, version)) == {"pause", "fetch", "write", "kv"}
        assert opened.gap(merged(opened.folder, new)) < CLOSE
        assert opened.gap(base) > FAR


def test_running_requests_go_on_under_the_new_weights(opened: Bench) -> None:
    base = load(opened.folder)
    opened.bind(factors(base, 0))
    check_install_in_the_middle(opened, factors(base, 3), factors(base, 4))


def test_groups_land_with_the_log_probs_of_transformers_and_aborted_ones_do_not(opened: Bench) -> None:
    new = factors(load(opened.folder), 5)
    opened.bind(new)
    opened.install(new, 8)
    opened.sampler.submit([group(1, 4, prompt=100), group(2, 4, tokens=300, prompt=100), group(3, 4, prompt=100)])
    opened.sampler.abort([2])
    landed = list(opened.sampler.landed(8))
    assert {(c.group, c.member) for c in landed} == {(g, m) for g in (1, 3) for m in range(4)}
    model = merged(opened.folder, new)
    for completion in landed:
        assert (completion.version, completion.boundaries, len(completion.token_ids)) == (8, (), 24)
        assert max(gaps(completion, model, 0, 24)) < CLOSE


def core(sampler: int) -> int:
    """vLLM's own process: the one below the sampler that holds the model."""
    sizes = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in below(sampler)}
    return max(sizes, key=lambda pid: sizes[pid])


def test_a_core_that_hangs_gives_no_sign_of_life(opened: Bench) -> None:
    sampler, hanging = opened.sampler, core(opened.sampler.pid)
    sampler.submit([group(4, 16, tokens=450)])
    os.kill(hanging, signal.SIGSTOP)
    try:
        time.sleep(2.5)  # a beat that was under way, and the question that stays without an answer
        heard = sampler.heard
        time.sleep(2.5)
        assert sampler.heard == heard
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert len(list(sampler.landed(16))) == 16
    assert sampler.heard > heard


def test_the_last_error_of_a_sampler_says_whether_another_one_may_do_better(opened: Bench, kind: str) -> None:
    """The last test of these samplers, which end and leave nothing behind."""
    processes = below(opened.sampler.pid)
    if kind == "adapter":
        new = factors(load(opened.folder), 1)
        new["model.layers.1.mlp.up_porj"] = new.pop("model.layers.1.mlp.up_proj")
        with pytest.raises(SamplerError, match=r"without a place.*: model\.layers\.1\.mlp\.up_porj") as failed:
            opened.bind(new)
        assert not isinstance(failed.value, SamplerLost)
    else:
        dying = core(opened.sampler.pid)
        os.kill(dying, signal.SIGSTOP)  # so that nothing lands before it ends
        opened.sampler.submit([group(5, 4, tokens=450)])
        os.kill(dying, signal.SIGKILL)
        with pytest.raises(SamplerLost, match="vLLM's own process ended"):
            list(opened.sampler.landed(4, deadline_seconds=10))
    assert gone(processes, 5)


def test_a_core_that_ends_under_its_first_request_is_lost_too(tmp_path: Path) -> None:
    with bench(tmp_path, engine="async", tensor_parallel=2) as made:
        dying = core(made.sampler.pid)
        os.kill(dying, signal.SIGSTOP)
        made.sampler.submit([group(0, 4, tokens=450)])
        os.kill(dying, signal.SIGKILL)
        with pytest.raises(SamplerLost, match="vLLM's own process ended"):
            list(made.sampler.landed(4, deadline_seconds=10))
