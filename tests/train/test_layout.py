from __future__ import annotations

import math

import pytest

from engine.train.layout import Trained, pack
from engine.types import Batch
from tests.conftest import completion

HEADER = tuple(range(1, 13))


def step() -> list[Trained]:
    prompts = [(*HEADER, 50, 51), (*HEADER, 60), (*HEADER, 50, 52, 53)]
    items = [
        completion(group, member, prompt, tuple(range(70 + 10 * member, 70 + 10 * member + 1 + member)))
        for group, prompt in enumerate(prompts)
        for member in range(3)
    ]
    return [Trained(item, 0.5 + i, i) for i, item in enumerate(items)]


def chain_text(batch: Batch, row: int) -> list[int]:
    """The tokens that the row's predicting hidden state has seen."""
    at = int(batch.predictors[row])
    layout, ids = batch.layout, batch.input_ids.tolist()
    segment = next(s for s in range(layout.n_segments) if layout.starts[s] <= at < layout.starts[s + 1])
    seen = [t for s in layout.chain(segment)[:-1] for t in ids[layout.starts[s] : layout.starts[s + 1]]]
    return seen + ids[layout.starts[segment] : at + 1]


@pytest.mark.parametrize("budget", [10_000, 40, 25, 1])
def test_every_token_is_predicted_from_its_prompt_and_the_tokens_before_it(budget: int) -> None:
    trained = {t.sequence: t for t in step()}
    seen: dict[int, int] = dict.fromkeys(trained, 0)
    for batch in pack(list(trained.values()), budget):
        for row, (target, sequence) in enumerate(zip(batch.targets.tolist(), batch.sequences.tolist(), strict=True)):
            item = trained[sequence]
            position = seen[sequence]
            assert target == item.completion.token_ids[position]
            assert chain_text(batch, row) == [
                *item.completion.prompt_ids,
                *item.completion.token_ids[:position],
            ]
            assert float(batch.advantages[row]) == pytest.approx(item.advantage)
            assert float(batch.sampled_logprobs[row]) == pytest.approx(item.completion.logprobs[position])
            seen[sequence] += 1
    assert seen == {s: len(t.completion.token_ids) for s, t in trained.items()}


def test_a_shared_beginning_stands_once() -> None:
    [batch] = pack(step(), 10_000)
    ids = batch.input_ids.tolist()
    assert sum(ids[i : i + len(HEADER)] == list(HEADER) for i in range(len(ids))) == 1
    assert len(ids) == len(HEADER) + (2 + 1 + 3) + 3 * (0 + 1 + 2)  # the last token of a completion is never fed


def test_the_budget_is_kept_where_it_can_be() -> None:
    for batch in pack(step(), 40):
        assert batch.input_ids.numel() <= 40


def test_tokens_without_a_sampling_log_prob_are_no_rows() -> None:
    item = completion(0, 0, (1, 2), (3, 4, 5), logprobs=(-0.5, math.nan, -0.25))
    [batch] = pack([Trained(item, 1.0, 0)], 100)
    assert batch.targets.tolist() == [3, 5]
    assert batch.input_ids.tolist() == [1, 2, 3, 4]
    assert batch.predictors.tolist() == [1, 3]


def big_step() -> list[Trained]:
    """Groups of unequal size, prompt and length, without a common beginning."""
    items = [
        completion(group, member, tuple(range(group, group + 5 + 9 * group)), tuple(range(3, 9 + 7 * member % 23)))
        for group in range(9)
        for member in range(2 + group % 4)
    ]
    return [Trained(item, 1.0, i) for i, item in enumerate(items)]


@pytest.mark.parametrize("budget", [150, 260, 500])
def test_micro_batches_are_few_and_about_equally_costly(budget: int) -> None:
    batches = pack(big_step(), budget)
    sizes = [batch.input_ids.numel() for batch in batches]
    assert max(sizes) <= budget
    assert sum(sizes) > budget * (len(sizes) - 2)  # no more than one could be saved
    assert max(sizes) - min(sizes) <= 110  # the largest group is no reason for more than itself
    assert sorted(s for batch in batches for s in batch.sequences.unique().tolist()) == list(range(len(big_step())))


def test_context_counts_in_the_cost() -> None:
    """A long prompt's tokens cost more than as many short ones: by work it gets a micro-batch to itself."""
    sizes = ((400, 6), (3, 248), (3, 248), (3, 148))
    items = [completion(g, 0, tuple(range(g, g + p)), tuple(range(n))) for g, (p, n) in enumerate(sizes)]
    step = [Trained(item, 1.0, i) for i, item in enumerate(items)]
    assert [set(b.sequences.tolist()) for b in pack(step, 700)] == [{0, 3}, {1, 2}]
    assert [set(b.sequences.tolist()) for b in pack(step, 700, context_cost=0.05)] == [{0}, {1, 2, 3}]


def test_sequences_that_share_nothing_stand_with_their_prompts() -> None:
    trained = {t.sequence: t for t in big_step()}
    batches = pack(list(trained.values()), 200, share=False)
    seen: dict[int, int] = dict.fromkeys(trained, 0)
    for batch in batches:
        assert set(batch.layout.prefixes) == {-1}
        assert batch.layout.n_segments == 1 or batch.layout.n_segments * max(batch.layout.lengths) <= 200
        for row, (target, sequence) in enumerate(zip(batch.targets.tolist(), batch.sequences.tolist(), strict=True)):
            item, position = trained[sequence].completion, seen[sequence]
            assert target == item.token_ids[position]
            assert chain_text(batch, row) == [*item.prompt_ids, *item.token_ids[:position]]
            seen[sequence] += 1
    assert seen == {s: len(t.completion.token_ids) for s, t in trained.items()}
