from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.rollout import SamplerError
from tests.rollout.tiny import RANK, factors, load, merged
from tests.sync.into_vllm import CLOSE, FAR, Bench, bench, check_install_in_the_middle

pytestmark = pytest.mark.slow
LEAVES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("adapter"), install="adapter", lora_rank=RANK, lora_targets=LEAVES) as opened:
        yield opened


def test_an_adapter_that_was_never_written_is_the_base(slots: Bench) -> None:
    assert slots.gap(load(slots.folder)) < CLOSE


def test_factors_are_exact_each_time_and_gone_with_the_next(slots: Bench) -> None:
    base = load(slots.folder)
    assert slots.bind(factors(base, 0)) == 10
    for version, seed in enumerate((1, 2, 1), start=1):
        new = factors(base, seed)
        slots.install(new, version)
        assert slots.gap(merged(slots.folder, new)) < CLOSE
        assert slots.gap(base) > FAR
    zero = {name: (a, torch.zeros_like(b)) for name, (a, b) in new.items()}
    slots.install(zero, 4)
    assert slots.gap(base) < CLOSE


def test_running_requests_go_on_under_the_new_weights(slots: Bench) -> None:
    base = load(slots.folder)
    slots.bind(factors(base, 0))
    check_install_in_the_middle(slots, factors(base, 3), factors(base, 4))


def test_a_tensor_without_a_place_fails_the_sync_with_its_name(slots: Bench) -> None:
    """The last one of this sampler, which ends."""
    new = factors(load(slots.folder), 1)
    new["model.layers.0.self_attn.q_porj"] = new.pop("model.layers.0.self_attn.q_proj")
    with pytest.raises(SamplerError, match=r"without a place.*: model\.layers\.0\.self_attn\.q_porj;"):
        slots.bind(new)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_head_with_factors(tmp_path_factory: pytest.TempPathFactory, tied: bool) -> None:
    leaves = (*LEAVES, "lm_head")
    folder = tmp_path_factory.mktemp("head")
    with bench(folder, tied=tied, install="adapter", lora_rank=RANK, lora_targets=leaves) as opened:
        new = factors(load(opened.folder), 1, leaves)
        assert opened.bind(new) == 11
        opened.install(new, 1)
        assert opened.gap(merged(opened.folder, new)) < CLOSE
        too_wide = {name: (torch.zeros(9, a.shape[1]), torch.zeros(b.shape[0], 9)) for name, (a, b) in new.items()}
        with pytest.raises(SamplerError, match=r"factor A is \(9, 64\), vLLM's slot \(8, 64\)"):
            opened.bind(too_wide)
