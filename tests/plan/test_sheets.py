"""Model sizes and phase times without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import recipe_file
from engine.errors import InputError
from engine.plan import gpus
from engine.plan.model import ModelSize, _counted, _named, model_size
from engine.plan.outcome import outcome
from engine.plan.scale import enough, splits, table
from engine.plan.simulate import Phases, Setup
from engine.snapshot import config_here

RECIPES = Path(__file__).parents[2] / "recipes"
FOUR = ModelSize(4e9, 4e9, 4e9, 73_728, 64e6, "a test")


def test_a_configuration_gives_the_published_number_of_parameters() -> None:
    qwen3_8b = {
        "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "tie_word_embeddings": False,
    }  # fmt: skip
    parameters, read, active, kv = _counted(qwen3_8b)
    assert parameters == pytest.approx(8.19e9, rel=0.001)
    assert read == active == pytest.approx(parameters - 4096 * 151936)
    assert kv == 2 * 36 * 8 * 128
    qwen3_30b_a3b = qwen3_8b | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }  # fmt: skip
    parameters, read, active, _ = _counted(qwen3_30b_a3b)
    assert parameters == pytest.approx(30.5e9, rel=0.01)
    assert active + 2048 * 151936 == pytest.approx(3.3e9, rel=0.03)
    assert read == pytest.approx(parameters - 2048 * 151936)


def test_hybrid_layers_keep_no_keys() -> None:
    hybrid = {
        "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 248320, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "attn_output_gate": True, "tie_word_embeddings": False,
    }  # fmt: skip
    parameters, _, _, kv = _counted(hybrid)
    assert kv == 2 * 8 * 4 * 256
    assert parameters == pytest.approx(9e9, rel=0.05)


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ("hf:dudeperf3ct/qwen35-4b-kodcode-sft-10k@34355613741e197528920acc211005f303524e58", 4e9),
        ("hf:Qwen/Qwen3.8-27B@main", 27e9),
        ("hf:Qwen/Qwen3-0.6B@main", 0.6e9),
        ("hf:HuggingFaceTB/SmolLM2-135M@main", 135e6),
    ],
)
def test_a_name_gives_the_size(source: str, size: float) -> None:
    assert _named(source) == size


def test_a_name_without_a_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"hf:org/base@main.*no size such as 4b"):
        _named("hf:org/base@main")


def test_a_configuration_in_the_hubs_cache_is_found_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    source = "hf:org/base-4b@main"
    recipe = recipe_file.load(RECIPES / "direct.toml", (f"model.source={source}",))
    assert config_here(source) is None
    assert model_size(recipe).parameters == 4e9
    cached = tmp_path / "models--org--base-4b"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 4}
    config = {"text_config": shape | {"intermediate_size": 128}}
    (cached / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))
    assert config_here(source) == cached / "snapshots" / "abc"
    found = model_size(recipe)
    assert found.parameters == 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 100
    assert "config.json" in found.source
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json has no 'hidden_size'"):
        model_size(recipe)


@pytest.mark.parametrize("mean", [20.0, 300.0, 1000.0])
def test_lengths_have_the_mean_that_was_asked_for(mean: float) -> None:
    lengths = [length for group in gpus.drawn_lengths(mean, 1024, 8) for length in group]
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.05)
    assert max(lengths) <= 1024
    assert min(lengths) >= 1


@pytest.mark.parametrize("mean", [0.5, 1024.0])
def test_a_mean_that_lengths_cannot_have_is_refused(mean: float) -> None:
    with pytest.raises(InputError, match=f"--mean-tokens {mean:g}"):
        gpus.drawn_lengths(mean, 1024, 8)


def phases(recipe: str, setup: Setup, model: ModelSize = FOUR, gpu: str = "h100", **keys: object) -> Phases:
    loaded = recipe_file.load(RECIPES / recipe, tuple(f"{k.replace('__', '.')}={v}" for k, v in keys.items()))
    lengths = gpus.drawn_lengths(800, 2048, 8)
    return gpus.sheet_phases(loaded, model, gpus.gpu_named(gpu), lengths, 0.5, setup)


def test_no_phase_beats_the_data_sheet() -> None:
    one = Setup(1, 1, 12, 64, 8)
    found = phases("direct.toml", one)
    assert found.decode_seconds > 8e9 / 3.35e12  # every weight is read
    # direct.toml computes the layers twice and has a KL: 4 + 2 + 2 operations a weight and token.
    assert found.train_token_seconds > 8 * 4e9 / 989.4e12
    full = found.max_sequences / (found.decode_seconds + found.max_sequences * found.decode_sequence_seconds)
    assert 2_000 < full < 20_000
    assert outcome(one, found).tokens_per_second > 2_000


def test_a_faster_memory_decodes_faster_and_an_older_gpu_trains_slower() -> None:
    one = Setup(1, 1, 12, 8, 8)
    h100, h200, a100 = (phases("direct.toml", one, gpu=name) for name in ("h100", "H200", "a100"))
    assert h200.decode_seconds < h100.decode_seconds < a100.decode_seconds
    assert h200.train_token_seconds == h100.train_token_seconds < a100.train_token_seconds
    assert h200.max_sequences >= h100.max_sequences


def test_more_hosts_sync_longer_and_more_trainers_exchange() -> None:
    setups = [Setup(1, 1, 12, 8, 8), Setup(4, 4, 12, 8, 8), Setup(56, 8, 12, 8, 8), Setup(48, 16, 12, 8, 8)]
    syncs = [phases("direct.toml", s).sync_seconds for s in setups]
    assert syncs[0] == syncs[1] < syncs[2] == syncs[3]
    exchanges = [phases("direct.toml", s).exchange_seconds for s in setups]
    assert exchanges[0] == 0 < exchanges[1] < exchanges[2] < exchanges[3]


def test_weights_that_do_not_fit_are_refused() -> None:
    big = ModelSize(70e9, 70e9, 70e9, 73_728, 1e8, "a test")
    with pytest.raises(InputError, match=r"weights take 140 GB.*tensor_parallel"):
        phases("direct.toml", Setup(1, 1, 1, 1, 8), big)


def test_splits_use_every_device_that_has_work() -> None:
    setup = Setup(1, 1, 8, prompts_per_step=50, group_size=4, max_lag=1)
    assert splits(2, setup, 1) == [(1, 1)]
    assert {s + t for s, t in splits(16, setup, 1)} == {16}
    assert splits(2, setup, 2) == []
    assert all(2 * s + t <= 16 for s, t in splits(16, setup, 2))
    small = Setup(1, 1, 8, prompts_per_step=1, group_size=4)
    assert all(s == 1 and t <= 4 for s, t in splits(1024, small, 1))


def test_the_best_split_follows_the_work_and_says_where_it_ends() -> None:
    base = Setup(1, 1, 8, prompts_per_step=16, group_size=4, max_lag=1)

    def rows(sampling: float, training: float):  # type: ignore[no-untyped-def]
        found = Phases(1e-6, sampling, ((50,) * 4,), 0.0, training)
        return table(base, lambda _: found, tensor_parallel=1, graders_for=lambda n: 8 * n, sizes=(2, 16, 64, 1024))

    samplers, trainers = rows(0.03, 0.001), rows(0.001, 0.03)
    assert samplers[1].verdict.setup.samplers >= 12
    assert trainers[1].verdict.setup.trainers >= 12
    assert enough(samplers) == 64
    assert samplers[-1].unused > 900
    assert samplers[-1].verdict.bottleneck == "batch"
    assert enough(samplers[:2]) is None
