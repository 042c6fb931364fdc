from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from engine.errors import TransferError
from engine.rollout import SamplerError
from engine.rollout.messages import Install, Installed
from tests.rollout.tiny import factors, load, make_model, merged
from tests.sync.into_vllm import CLOSE, FAR, Bench, bench, check_install_in_the_middle

pytestmark = pytest.mark.slow
LEAVES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Its vLLM was told to serve at a port that is taken, and took another one."""
    with socket.create_server(("", 0)) as taken, pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_PORT", str(taken.getsockname()[1]))
        with bench(tmp_path_factory.mktemp("merged")) as opened:
            yield opened


def test_factors_are_exact_each_time_and_gone_with_the_next(tied: Bench) -> None:
    base = load(tied.folder)
    assert tied.gap(base) < CLOSE
    assert tied.bind(factors(base, 0)) == 10
    for version, seed in enumerate((1, 2, 1), start=1):
        new = factors(base, seed)
        assert set(tied.install(new, version)) == {"fetch", "write", "kv"}
        assert tied.gap(merged(tied.folder, new)) < CLOSE
        assert tied.gap(base) > FAR
    zero = {name: (a, torch.zeros_like(b)) for name, (a, b) in new.items()}
    tied.install(zero, 4)
    assert tied.gap(base) < CLOSE


def test_a_broadcast_brings_what_shared_memory_does(tied: Bench) -> None:
    """NCCL takes the same way; a member that meets nobody leaves the sampler as it was."""
    base = load(tied.folder)
    assert tied.bind(factors(base, 0), "gloo") == 10
    for version, seed in enumerate((3, 4), start=1):
        new = factors(base, seed)
        assert set(tied.install(new, version)) == {"fetch", "write", "kv"}
        assert tied.gap(merged(tied.folder, new)) < CLOSE
        assert tied.gap(base) > FAR
    check_install_in_the_middle(tied, factors(base, 5), factors(base, 6))
    assert tied.memory is not None
    [meeting] = tied.memory.meet({tied.sampler.pid: 1, 0: 1})[:1]
    tied.sampler.send(Install(7, meeting))
    with pytest.raises(TransferError, match="member 0 never came"):
        tied.memory.send(7, lambda: [0])
    missed = tied.sampler.answer(Installed, "the install that fails")
    assert missed.seconds == {}
    assert "member 0 never came" in missed.missed
    assert tied.gap(merged(tied.folder, factors(base, 6))) < CLOSE


def test_running_requests_go_on_under_the_new_weights(tied: Bench) -> None:
    base = load(tied.folder)
    tied.bind(factors(base, 0))
    check_install_in_the_middle(tied, factors(base, 3), factors(base, 4))


def test_every_weight_of_a_tied_model_through_the_same_door(tied: Bench) -> None:
    new = load(tied.folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    weights = {name: (tensor,) for name, tensor in new.named_parameters()}
    assert "lm_head.weight" not in weights  # the embedding stands for both
    assert tied.bind(weights) == len(weights)
    tied.install(weights, 7)
    assert tied.gap(new) < CLOSE
    assert tied.gap(load(tied.folder)) > FAR


def test_a_renamed_tensor_fails_the_sync_with_its_name(tied: Bench) -> None:
    """The last one of this sampler, which ends."""
    new = factors(load(tied.folder), 1)
    new["model.layers.1.mlp.up_porj"] = new.pop("model.layers.1.mlp.up_proj")
    with pytest.raises(SamplerError, match=r"without a place.*: model\.layers\.1\.mlp\.up_porj\.weight;"):
        tied.bind(new)


def test_an_untied_head_and_the_factors_of_a_tied_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    for tied_head in (False, True):
        folder = tmp_path_factory.mktemp("heads")
        with bench(folder, tied=tied_head) as opened:
            base = load(make_model(folder / "same", tied=tied_head))
            new = factors(base, 1, LEAVES)
            assert "lm_head" in new
            opened.bind(new)
            opened.install(new, 1)
            assert opened.gap(merged(opened.folder, new)) < CLOSE
