"""Ways to train beside plain LoRA: full weights, LoRA on the head, recurrent layers, checkpoints, several updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.recipe import Full, Lora
from engine.recipe_file import RecipeError
from engine.train.lora import add_lora
from engine.train.policy import Policy, trained_names
from engine.train.step import Trainer
from engine.types import Graded
from kernels.layout import Layout
from tests.conftest import completion, graded
from tests.train.test_step import MIXED, gradients, groups, perturbed, recipe_for

pytestmark = pytest.mark.slow
FULL = {"lora": None, "full": {}}


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 of three Gated DeltaNet layers and one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=[*["linear_attention"] * 3, "full_attention"], tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-hybrid")
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def plain_loss(model: nn.Module, data: list[list[Graded]], advantages: list[list[float]]) -> torch.Tensor:
    """The token-mean loss by one forward of each whole sequence."""
    total = sum(len(item.completion.token_ids) for group in data for item in group)
    loss = torch.zeros((), dtype=torch.float64)
    for group, row in zip(data, advantages, strict=True):
        for item, advantage in zip(group, row, strict=True):
            prompt, ids = item.completion.prompt_ids, item.completion.token_ids
            logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            loss = loss - advantage * (logprobs - logprobs.detach()).exp().sum() / total
    return loss


def plain_gradients(folder: Path, trainer: Trainer, data: list[list[Graded]]) -> dict[str, torch.Tensor]:
    """float64 gradients by the trainer's parameter names, from transformers' own attention and head."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    named = trainer.policy.trained.named_parameters
    if any(name.endswith("lora_a") for name in named):
        targets = sorted({name.rpartition(".")[0] for name in named})
        theirs = add_lora(model, targets, rank=4, scale=2.0, seed=0).named_parameters
        for layer in model.modules():  # one layer at a time, as text says it, instead of our grouped kernel
            if hasattr(layer, "lora_a"):
                layer.forward = lambda x, m=layer: m.base(x) + 2.0 * (x @ m.lora_a.double().T) @ m.lora_b.double().T
    else:
        theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            theirs[name].copy_(parameter)
    plain_loss(model, data, trainer.advantages(data)).backward()
    return {name: theirs[name].grad.double() for name in named if theirs[name].grad is not None}


def assert_close(trainer: Trainer, expected: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    found = {n: p.grad.double() for n, p in trainer.policy.trained.named_parameters.items() if p.grad is not None}
    assert found.keys() == expected.keys()
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    for name, want in expected.items():
        assert float((found[name] - want).norm() / whole) < tolerance, name


def test_full_weights_get_the_gradient_of_a_plain_model(tiny_model: Path) -> None:
    trainer = Trainer(recipe_for(**FULL), tiny_model)
    data = groups(MIXED)
    expected = plain_gradients(tiny_model, trainer, data)
    before = {name: weight.clone() for name, weight in trainer.policy.trained.named_parameters.items()}
    stats = trainer.step(data, trainer.advantages(data), 1)
    assert not stats.skipped
    assert_close(trainer, expected)
    assert "model.embed_tokens.weight" in expected  # tied: as an embedding and as the head
    moved = [not torch.equal(w, before[name]) for name, w in trainer.policy.trained.named_parameters.items()]
    assert all(moved)


def test_frozen_weights_stay(tiny_model: Path) -> None:
    trainer = Trainer(
        recipe_for(lora=None, full={"freeze": ("model.embed_tokens", r".*layernorm\.weight")}), tiny_model
    )
    frozen = {n: w.clone() for n, w in trainer.policy.model.named_parameters() if not w.requires_grad}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in frozen} == {
        "embed_tokens", "input_layernorm", "post_attention_layernorm",
    }  # fmt: skip
    trainer.step(groups(MIXED), trainer.advantages(groups(MIXED)), 1)
    now = dict(trainer.policy.model.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items())
    with pytest.raises(LookupError, match="embed_tokns"):
        trained_names(tiny_model, Full(freeze=("embed_tokns",)))
    with pytest.raises(LookupError, match="every parameter is frozen"):
        trained_names(tiny_model, Full(freeze=(".*",)))


def test_bf16_weights_follow_fp32_masters_that_see_every_micro_batch(tiny_model: Path) -> None:
    def trained(budget: int) -> Trainer:
        recipe = recipe_for(**FULL, model={"source": "t", "dtype": "bfloat16"}, train={"token_budget": budget})
        return Trainer(recipe, tiny_model)

    data = groups(MIXED)
    whole, cut = trained(4096), trained(64)
    found = [gradients_of(trainer, data) for trainer in (whole, cut)]
    # bf16 rounds the activations of both; what must not happen is a sum of micro-batches in bf16.
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 2e-2
    for name, master in whole.policy.trained.named_parameters.items():
        weight = whole.policy.model.get_parameter(name)
        assert (weight.dtype, master.dtype, weight.grad) == (torch.bfloat16, torch.float32, None)
        assert torch.equal(weight, master.bfloat16())


def gradients_of(trainer: Trainer, data: list[list[Graded]]) -> torch.Tensor:
    trainer.step(data, trainer.advantages(data), 1)
    return torch.cat([p.grad.flatten() for p in trainer.policy.trained.parameters if p.grad is not None]).double()


def test_kl_of_full_weights_is_to_the_model_as_it_was(tiny_model: Path) -> None:
    trainer = Trainer(recipe_for(**FULL, loss={"kl": 0.1}, optim={"lr": 1e-2, "max_grad_norm": 1e9}), tiny_model)
    data = groups(MIXED)
    first, second = (trainer.step(data, trainer.advantages(data), step) for step in (1, 2))
    assert abs(first.kl) < 1e-6
    assert second.kl > 1e-4


def test_lora_on_the_head_gets_its_gradient_and_counts_in_the_score(tiny_model: Path) -> None:
    targets = ("q_proj", "gate_proj", "lm_head")
    trainer = perturbed(recipe_for(lora={"rank": 4, "alpha": 8.0, "targets": targets}), tiny_model)
    data = groups(MIXED)
    expected = plain_gradients(tiny_model, trainer, data)
    policy = trainer.policy
    with_head = policy.score((1, 2, 3, 4))
    with policy.base_model():
        assert policy.score((1, 2, 3, 4)) == Policy(
            tiny_model, dtype="float32", device="cpu", how=Lora(), seed=0
        ).score((1, 2, 3, 4))
    policy.adapter.factors()["lm_head"][1].mul_(2)
    assert policy.score((1, 2, 3, 4)) != with_head
    policy.adapter.factors()["lm_head"][1].div_(2)
    trainer.step(data, trainer.advantages(data), 1)
    assert_close(trainer, expected)


@pytest.mark.parametrize("ways", [{}, FULL], ids=["lora", "full"])
def test_checkpointing_changes_memory_and_not_a_bit_of_the_gradient(tiny_model: Path, ways: dict[str, object]) -> None:
    plain = Trainer(recipe_for(**ways), tiny_model)
    less = Trainer(recipe_for(**ways, train={"checkpointing": True}), tiny_model)
    data = groups(MIXED)
    assert torch.equal(gradients_of(plain, data), gradients_of(less, data))
    assert less.require_room().kept.slope < 0.5 * plain.require_room().kept.slope


def test_a_recurrent_model_is_trained_on_whole_sequences(hybrid_model: Path) -> None:
    targets = ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "down_proj")
    trainer = perturbed(recipe_for(lora={"rank": 4, "alpha": 8.0, "targets": targets}), hybrid_model)
    assert not trainer.policy.shares_prefixes
    data = groups(MIXED)
    expected = plain_gradients(hybrid_model, trainer, data)
    trainer.step(data, trainer.advantages(data), 1)
    assert_close(trainer, expected, 1e-4)
    with pytest.raises(ValueError, match=r"recurrent state.*shares no prefix"):
        trainer.policy.hidden(torch.tensor([1, 2, 3]), Layout((0, 2, 3), (-1, 0)))


def test_a_recurrent_model_s_gradient_does_not_depend_on_the_cut(hybrid_model: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "out_proj")}
    found = [
        gradients(perturbed(recipe_for(lora=lora, train=train), hybrid_model), groups(MIXED))
        for train in ({}, {"token_budget": 64}, {"checkpointing": True})
    ]
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) < 1e-5


def test_several_updates_keep_the_log_probs_of_the_start(tiny_model: Path) -> None:
    """Two updates on a batch are two steps, the second with the ratio to where the first began."""
    data = groups(MIXED)[:2]
    whole = perturbed(recipe_for(optim={"updates": 2, "lr": 1e-2, "max_grad_norm": 1e9}), tiny_model)
    apart = perturbed(recipe_for(loss={"old": "sampler"}, optim={"lr": 1e-2, "max_grad_norm": 1e9}), tiny_model)
    advantages = whole.advantages(data)
    start = [[replaced_logprobs(apart, item) for item in group] for group in data]
    stats = whole.step(data, advantages, 1)
    for i in range(2):
        apart.step([start[i]], [advantages[i]], 1)
    assert stats.micro_batches == 2
    once = perturbed(recipe_for(), tiny_model).step(data, advantages, 1)
    assert stats.mismatch_max == pytest.approx(once.mismatch_max, rel=1e-4)  # the sampler's policy is the start's
    for name, (a, b) in whole.policy.adapter.factors().items():
        other = apart.policy.adapter.factors()[name]
        torch.testing.assert_close(a, other[0], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(b, other[1], rtol=1e-3, atol=1e-5)


def replaced_logprobs(trainer: Trainer, item: Graded) -> Graded:
    """The same completion with the trainer's present log-probs as the sampler's."""
    prompt, ids = item.completion.prompt_ids, item.completion.token_ids
    scores = trainer.policy.score((*prompt, *ids))[len(prompt) - 1 :]
    return graded(replace(completion(0, 0, prompt, ids), **vars_of(item, scores)), item.reward)


def vars_of(item: Graded, scores: tuple[float, ...]) -> dict[str, object]:
    return {"group": item.completion.group, "member": item.completion.member, "logprobs": scores}


def test_a_recipe_trains_one_way() -> None:
    with pytest.raises(RecipeError, match=r"\[lora\] and \[full\]"):
        recipe_for(full={})
    with pytest.raises(RecipeError, match="count twice"):
        recipe_for(loss={"old": "sampler", "correction": "truncate"})
