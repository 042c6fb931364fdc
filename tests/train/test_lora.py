from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.train.lora import add_lora, match_targets

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (ALL, 14),
        (("q_proj",), 2),
        (("layers.1.mlp.down_proj",), 1),
        ((r"model\.layers\.0\..*",), 7),
        (("lm_head",), 1),
    ],
)
def test_targets_match_by_name_suffix_and_expression(tiny_model: Path, targets: tuple[str, ...], count: int) -> None:
    assert len(match_targets(load(tiny_model), targets)) == count


@pytest.mark.parametrize("target", ["q_porj", "norm", "model.layers.9.self_attn.q_proj", "[", "proj"])
def test_a_target_that_matches_nothing_is_an_error(tiny_model: Path, target: str) -> None:
    with pytest.raises(LookupError, match="matches no linear layer"):
        match_targets(load(tiny_model), ("k_proj", target))


def test_the_start_is_the_base_model_and_factors_add_scale_times_b_a(tiny_model: Path) -> None:
    base, adapted = load(tiny_model), load(tiny_model)
    adapter = add_lora(adapted, ALL, rank=3, scale=0.7, seed=1)
    ids = torch.randint(131, (1, 9))
    with torch.no_grad():
        assert torch.allclose(base(ids).logits, adapted(ids).logits, atol=1e-12)
        merged = load(tiny_model)
        for name, (a, b) in adapter.factors().items():
            b.normal_(generator=torch.Generator().manual_seed(len(name)))
            merged.get_submodule(name).weight.add_(0.7 * (b.double() @ a.double()))
        assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-9)
        with adapter.disabled():
            assert torch.allclose(base(ids).logits, adapted(ids).logits, atol=1e-12)


def test_the_seed_decides_a_and_the_base_is_frozen(tiny_model: Path) -> None:
    first, second, third = (add_lora(load(tiny_model), ALL, rank=3, scale=1.0, seed=s) for s in (1, 1, 2))
    for name, (a, b) in first.factors().items():
        assert torch.equal(a, second.factors()[name][0])
        assert not torch.equal(a, third.factors()[name][0])
        assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
        assert int(b.count_nonzero()) == 0
    model = load(tiny_model)
    adapter = add_lora(model, ALL, rank=3, scale=1.0, seed=1)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in adapter.parameters}
