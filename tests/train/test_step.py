"""The optimizer step on a tiny random model: what must not depend on how it is cut, and what it must leave alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import recipe_file as recipes
from engine.recipe import Lora
from engine.train.objective import OBJECTIVES
from engine.train.step import Trainer, learning_rate_factor, loss_spec
from engine.types import Graded
from tests.conftest import completion, graded

PROMPTS = [tuple(range(1, 15)), (*range(1, 12), 40, 41), (90, 91, 92)]


def recipe_for(**sections: dict[str, object] | None) -> recipes.Recipe:
    """A small recipe with these sections laid over it; None leaves a section out."""
    base: dict[str, dict[str, object]] = {
        "run": {"name": "t", "steps": 10},
        "model": {"source": "tiny"},
        "tasks": {"train": "generated:train"},
        "rollout": {"max_tokens": 8},
        "lora": {"rank": 4, "alpha": 8.0},
        "optim": {"lr": 1e-3, "max_grad_norm": 1e9},
    }
    names = [name for name in {**base, **sections} if sections.get(name, {}) is not None]
    return recipes.parse({name: {**base.get(name, {}), **(sections.get(name) or {})} for name in names})


def groups(rewards: list[list[float | None]]) -> list[list[Graded]]:
    out = []
    for g, row in enumerate(rewards):
        members = []
        for m, reward in enumerate(row):
            ids = tuple((17 * g + 5 * m + 3 * i) % 131 for i in range(1 + (g + 2 * m) % 5))
            members.append(graded(completion(g, m, PROMPTS[g], ids), reward))
        out.append(members)
    return out


MIXED: list[list[float | None]] = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0], [0.25, 0.5, 1.0, 0.0]]


def gradients(trainer: Trainer, data: list[list[Graded]]) -> torch.Tensor:
    """The step's gradient, taken before AdamW changes anything: the first moment is (1 - beta1) g."""
    trainer.step(data, trainer.advantages(data), 1)
    return torch.cat([p.grad.flatten() for p in trainer.policy.adapter.parameters if p.grad is not None]).double()


def perturbed(recipe: recipes.Recipe, folder: Path) -> Trainer:
    """A trainer whose B is not zero, so that A has a gradient too."""
    trainer = Trainer(recipe, folder)
    generator = torch.Generator().manual_seed(5)
    for _, b in trainer.policy.adapter.factors().values():
        b.normal_(std=0.05, generator=generator)
    return trainer


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_gradients_do_not_depend_on_the_micro_batches(tiny_model: Path, objective: str, aggregate: str) -> None:
    loss = {"objective": objective, "aggregate": aggregate}
    whole, *cuts = (
        gradients(perturbed(recipe_for(loss=loss, train={"token_budget": budget}), tiny_model), groups(MIXED))
        for budget in (4096, 64)
    )
    for cut in cuts:
        assert float((cut - whole).norm() / whole.norm()) < 1e-5


def test_gradients_equal_padded_forwards_of_a_plain_model(tiny_model: Path) -> None:
    trainer = perturbed(recipe_for(), tiny_model)
    data = groups(MIXED)
    advantages = trainer.advantages(data)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    from engine.train.lora import add_lora

    adapter = add_lora(plain, Lora().targets, rank=4, scale=2.0, seed=0)
    for name, (a, b) in trainer.policy.adapter.factors().items():
        adapter.factors()[name][0].copy_(a)
        adapter.factors()[name][1].copy_(b)
    total = sum(len(item.completion.token_ids) for group in data for item in group)
    loss = torch.zeros((), dtype=torch.float64)
    for group, row in zip(data, advantages, strict=True):
        for item, advantage in zip(group, row, strict=True):
            prompt, ids = item.completion.prompt_ids, item.completion.token_ids
            logits = plain(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            loss = loss - advantage * (logprobs - logprobs.detach()).exp().sum() / total
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in adapter.parameters if p.grad is not None])
    found = gradients(trainer, data)
    assert float((found - expected).norm() / expected.norm()) < 2e-5


def test_a_step_moves_every_factor_and_leaves_the_base_alone(tiny_model: Path) -> None:
    trainer = Trainer(recipe_for(), tiny_model)
    before = {name: (a.clone(), b.clone()) for name, (a, b) in trainer.policy.adapter.factors().items()}
    base = base_hash(trainer)
    data = groups(MIXED)
    for step in (1, 2):  # B starts at zero, so A has no gradient in the first step
        stats = trainer.step(data, trainer.advantages(data), step)
        assert stats.grad_norm > 0
        assert not stats.skipped
    assert base_hash(trainer) == base
    for name, (a, b) in trainer.policy.adapter.factors().items():
        assert not torch.equal(a, before[name][0]), name
        assert not torch.equal(b, before[name][1]), name


def base_hash(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for name, tensor in trainer.policy.model.state_dict().items():
        if "lora_" not in name:
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def test_groups_without_signal_change_time_but_not_the_gradient(tiny_model: Path) -> None:
    rewards: list[list[float | None]] = [MIXED[0], [0.5] * 4, [None] * 4]
    data = groups(rewards)
    trainer = perturbed(recipe_for(), tiny_model)
    found = gradients(trainer, data)
    alone = groups([MIXED[0]])
    judged = sum(len(i.completion.token_ids) for g in data for i in g if i.reward is not None)
    scale = sum(len(i.completion.token_ids) for i in alone[0]) / judged
    expected = gradients(perturbed(recipe_for(), tiny_model), alone) * scale
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_step_without_any_signal_changes_nothing(tiny_model: Path) -> None:
    trainer = Trainer(recipe_for(), tiny_model)
    data = groups([[1.0] * 4, [None] * 4, [0.0] * 4])
    stats = trainer.step(data, trainer.advantages(data), 1)
    assert (stats.skipped, stats.trained_tokens, stats.loss) == (True, 0, 0.0)
    assert all(int(b.count_nonzero()) == 0 for _, b in trainer.policy.adapter.factors().values())


def test_masked_truncated_completions_count_in_the_statistics_and_train_nothing(tiny_model: Path) -> None:
    data = groups(MIXED)
    cut = data[0][0].completion
    data[0][0] = graded(completion(0, 0, cut.prompt_ids, cut.token_ids, finish="length"), 1.0)
    trainer = Trainer(recipe_for(loss={"mask_truncated": True}), tiny_model)
    advantages = trainer.advantages(data)
    assert advantages[0] == Trainer(recipe_for(), tiny_model).advantages(groups(MIXED))[0]
    stats = trainer.step(data, advantages, 1)
    assert stats.trained_tokens == sum(len(i.completion.token_ids) for g in data for i in g) - len(cut.token_ids)


def test_the_temperature_divides_the_logits(tiny_model: Path) -> None:
    def mismatch(temperature: float) -> float:
        trainer = Trainer(recipe_for(rollout={"temperature": temperature, "max_tokens": 8}), tiny_model)
        data = groups(MIXED)
        policy = trainer.policy
        for group in data:
            for m, item in enumerate(group):
                prompt, ids = item.completion.prompt_ids, item.completion.token_ids
                from transformers import AutoModelForCausalLM

                plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
                with torch.no_grad():
                    logits = plain(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
                logprobs = (logits / 0.6).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
                group[m] = graded(
                    completion(item.completion.group, m, prompt, ids, logprobs=tuple(logprobs.tolist())),
                    item.reward,
                )
        assert policy.model is not None
        return trainer.step(data, trainer.advantages(data), 1).mismatch_max

    assert mismatch(0.6) < 1e-5
    assert mismatch(1.0) > 1e-3


@pytest.mark.parametrize("updates", [1, 3])
def test_the_largest_gaps_are_kept_by_completion_and_token(tiny_model: Path, updates: int) -> None:
    trainer = Trainer(recipe_for(optim={"updates": updates, "lr": 1e-3}, train={"token_budget": 64}), tiny_model)
    data = groups(MIXED)
    numbered = [item for group in data for item in group]
    stats = trainer.step(data, trainer.advantages(data), 1)
    assert max(stats.gaps) >= len(data[0]) + len(data[1])  # of the last group, in whichever update it was
    for number, gaps in stats.gaps.items():
        completion = numbered[number].completion
        assert [at for at, _ in gaps] == sorted({at for at, _ in gaps})
        assert all(0 <= at < len(completion.token_ids) and abs(gap) >= 0.01 for at, gap in gaps)
    largest = max(abs(gap) for gaps in stats.gaps.values() for _, gap in gaps)
    assert largest == pytest.approx(stats.mismatch_max)


def test_only_tokens_of_the_version_that_is_trained_count_as_a_mismatch(tiny_model: Path) -> None:
    """An older version's tokens, a completion's beginning too, differ by the lag and say nothing of the sampler."""
    data = groups(MIXED)
    whole = Trainer(recipe_for(), tiny_model)
    expected = whole.step(data, whole.advantages(data), 1)
    assert expected.mismatch_tokens == expected.trained_tokens
    far = [[aged(item, 2 if item.completion.member else None) for item in group] for group in data]
    trainer = Trainer(recipe_for(), tiny_model)
    stats = trainer.step(far, trainer.advantages(far), 5)
    kept = [item.completion for group in data for item in group if item.completion.member]
    assert stats.mismatch_tokens == sum(max(0, len(c.token_ids) - 2) for c in kept) > 0
    assert stats.mismatch_max < 10 < stats.ratio_max  # the ratio's extremes are of all
    assert stats.trained_tokens == expected.trained_tokens
    none = Trainer(recipe_for(), tiny_model).step(data, whole.advantages(data), 3)
    assert (none.mismatch_tokens, none.mismatch_mean, none.mismatch_max, none.gen_kl) == (0, 0.0, 0.0, 0.0)


def aged(item: Graded, boundary: int | None) -> Graded:
    """As version 3 sampled it up to `boundary`, far from what the trainer says, and version 4 from there on."""
    own, end = item.completion, len(item.completion.token_ids) if boundary is None else boundary
    logprobs = tuple(-50.0 if i < end else value for i, value in enumerate(own.logprobs))
    spans = ((end, 4),) if end < len(own.token_ids) else ()
    changed = completion(
        own.group, own.member, own.prompt_ids, own.token_ids, logprobs=logprobs, version=3, boundaries=spans
    )
    return graded(changed, item.reward)


def test_a_gradient_that_is_no_number_is_skipped_and_ten_in_a_row_stop(tiny_model: Path) -> None:
    trainer = Trainer(recipe_for(), tiny_model)
    data = groups(MIXED)
    infinite = [[math.inf if a > 0 else a for a in row] for row in trainer.advantages(data)]
    for step in range(1, 10):
        assert trainer.step(data, infinite, step).skipped
    assert all(int(b.count_nonzero()) == 0 for _, b in trainer.policy.adapter.factors().values())
    with pytest.raises(FloatingPointError, match=r"optim\.lr"):
        trainer.step(data, infinite, 10)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 7 / 8, 6 / 8]),
        ("cosine", [1 / 3, 2 / 3, 1]),
    ],
)
def test_learning_rate(schedule: str, factors: list[float]) -> None:
    found = [learning_rate_factor(step, 10, 2, schedule) for step in range(1, len(factors) + 1)]
    assert found == pytest.approx(factors)
    assert all(learning_rate_factor(s, 10, 2, schedule) > 0 for s in range(1, 11))


@pytest.mark.parametrize("key", ["advantage", "objective", "correction", "aggregate"])
def test_an_unknown_choice_is_refused_naming_the_nearest(key: str) -> None:
    good: Callable[[str], str] = lambda k: getattr(recipe_for().loss, k)  # noqa: E731
    with pytest.raises(ValueError, match=f"loss.{key}.*did you mean {good(key)}"):
        loss_spec(recipe_for(loss={key: good(key) + "x"}))
