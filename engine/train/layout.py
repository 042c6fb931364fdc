"""From trained completions to packed micro-batches: a shared prompt stands once, nothing is padded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.types import Batch, Completion
from kernels.layout import Layout

HEADER_TOKENS = 8
"""Prompts of different groups that begin with at least this many equal tokens share them too."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A completion and the advantage of its tokens."""

    completion: Completion
    advantage: float
    sequence: int
    """Its number within the optimizer step."""

    @property
    def rows(self) -> list[int]:
        """Positions of its trainable tokens: those whose sampling log-prob is a number."""
        return [i for i, logprob in enumerate(self.completion.logprobs) if math.isfinite(logprob)]


def pack(
    trained: Sequence[Trained],
    token_budget: int,
    *,
    share: bool = True,
    context_cost: float = 0.0,
    multiple: int = 1,
) -> list[Batch]:
    """Cut completions into the fewest micro-batches of at most `token_budget` forward tokens, about equally costly.

    A group stays together, its prompt standing once, unless it is larger than the budget; a completion longer than
    the budget gets a micro-batch of its own. share=False: every completion stands with a prompt of its own, those of
    similar length together, and the budget counts the tokens of the longest for each. context_cost: what a token of
    context adds to the cost of a token, over what the token itself costs. multiple: where
    prompts are shared and there is enough to share out, their number is a multiple of this, for as many trainers.
    """
    if not trained:
        return []
    if not share:
        return [_pack_alone(part) for part in _cut_by_length(trained, token_budget)]
    header = _common_beginning(list({t.completion.group: t.completion.prompt_ids for t in trained}.values()))
    pieces = _pieces(trained, token_budget - header, header)
    costs = [_cost(piece, header, context_cost) for piece in pieces]
    sizes = [_tokens(piece, header) for piece in pieces]
    parts = _balance(costs, sizes, token_budget - header, multiple)
    chosen = [sorted((t for i in part for t in pieces[i]), key=lambda t: t.sequence) for part in parts]
    return [_pack_one(part) for part in sorted(chosen, key=lambda part: part[0].sequence)]


def _pieces(trained: Sequence[Trained], budget: int, header: int) -> list[list[Trained]]:
    """Groups, and the parts of those that are larger than the budget."""
    groups: dict[int, list[Trained]] = {}
    for item in trained:
        groups.setdefault(item.completion.group, []).append(item)
    pieces: list[list[Trained]] = []
    for group in groups.values():
        if _tokens(group, header) <= budget:
            pieces.append(group)
            continue
        lengths = [_fed(item) for item in group]
        prompt = len(group[0].completion.prompt_ids) - header
        pieces += [[group[i] for i in part] for part in _balance(lengths, lengths, budget - prompt)]
    return pieces


def _balance(costs: Sequence[float], sizes: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Items into the fewest bins of at most `budget`, the costliest first into the cheapest bin that has room.

    An item larger than the budget gets a bin of its own. Their number is a multiple of `multiple`, empty ones aside.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    alone = [[i] for i in order if sizes[i] > budget]
    rest = [i for i in order if sizes[i] <= budget]
    least = -(-sum(sizes[i] for i in rest) // max(budget, 1)) + len(alone)
    total = -(-least // multiple) * multiple
    while True:
        bins: list[list[int]] = [[] for _ in range(total - len(alone))]
        for i in rest:
            room = [b for b in bins if sum(sizes[j] for j in b) + sizes[i] <= budget]
            if not room:
                break
            min(room, key=lambda b: sum(costs[j] for j in b)).append(i)
        else:
            return [*alone, *(b for b in bins if b)]
        total += multiple


def _fed(item: Trained) -> int:
    """Tokens of a completion that are fed: the last one predicts nothing."""
    return len(item.completion.token_ids) - 1


def _tokens(piece: Sequence[Trained], header: int) -> int:
    return len(piece[0].completion.prompt_ids) - header + sum(_fed(item) for item in piece)


def _cost(piece: Sequence[Trained], header: int, context_cost: float) -> float:
    """Tokens, and the context that each of them attends to, in tokens' worth of work."""
    prompt = len(piece[0].completion.prompt_ids)
    own = prompt - header
    pairs = own * (header + own / 2) + sum(_fed(t) * (prompt + _fed(t) / 2) for t in piece)
    return _tokens(piece, header) + context_cost * pairs


def _cut_by_length(trained: Sequence[Trained], token_budget: int) -> list[list[Trained]]:
    parts: list[list[Trained]] = []
    longest = 0
    for item in sorted(trained, key=lambda t: (-_whole(t), t.sequence)):
        if not parts or (len(parts[-1]) + 1) * longest > token_budget:
            parts.append([])
            longest = _whole(item)
        parts[-1].append(item)
    return parts


def _whole(item: Trained) -> int:
    return len(item.completion.prompt_ids) + _fed(item)


def _pack_alone(trained: Sequence[Trained]) -> Batch:
    """Each completion behind a prompt of its own, as one segment."""
    lengths = [_whole(item) for item in trained]
    layout = Layout.from_lengths(lengths, [-1] * len(lengths))
    ids = [i for t in trained for i in (*t.completion.prompt_ids, *t.completion.token_ids[:-1])]
    firsts = [s + len(t.completion.prompt_ids) - 1 for s, t in zip(layout.starts, trained, strict=False)]
    return _batch(trained, ids, layout, [first + i for first, t in zip(firsts, trained, strict=True) for i in t.rows])


def _pack_one(trained: Sequence[Trained]) -> Batch:
    """A tree: what all prompts begin with, the prompts, the completions of each."""
    prompts = {item.completion.group: item.completion.prompt_ids for item in trained}
    shared = _common_beginning(list(prompts.values()))
    ids: list[int] = []
    starts, prefixes = [0], list[int]()

    def segment(tokens: Sequence[int], prefix: int) -> int:
        ids.extend(tokens)
        starts.append(len(ids))
        prefixes.append(prefix)
        return len(prefixes) - 1

    header = segment(next(iter(prompts.values()))[:shared], -1) if shared else -1
    prompt_segment = {group: segment(prompt[shared:], header) for group, prompt in prompts.items()}
    predictors: list[int] = []
    for item in trained:
        completion = item.completion
        last_of_prompt = starts[prompt_segment[completion.group] + 1] - 1
        first = len(ids)
        if len(completion.token_ids) > 1:  # the last token predicts nothing, so it is never fed
            segment(completion.token_ids[:-1], prompt_segment[completion.group])
        predictors += [last_of_prompt if i == 0 else first + i - 1 for i in item.rows]
    return _batch(trained, ids, Layout(tuple(starts), tuple(prefixes)), predictors)


def _batch(trained: Sequence[Trained], ids: list[int], layout: Layout, predictors: list[int]) -> Batch:
    rows = [(item, i) for item in trained for i in item.rows]
    return Batch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        layout=layout,
        predictors=torch.tensor(predictors, dtype=torch.int64),
        targets=torch.tensor([t.completion.token_ids[i] for t, i in rows], dtype=torch.int64),
        sampled_logprobs=torch.tensor([t.completion.logprobs[i] for t, i in rows], dtype=torch.float32),
        advantages=torch.tensor([t.advantage for t, _ in rows], dtype=torch.float32),
        sequences=torch.tensor([t.sequence for t, _ in rows], dtype=torch.int64),
        versions=torch.tensor([v for t in trained for v in _versions(t)], dtype=torch.int64),
    )


def _versions(item: Trained) -> list[int]:
    """Of its trainable tokens."""
    versions = item.completion.versions
    return [versions[i] for i in item.rows]


def _common_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with, 0 if too few to be worth a segment; every prompt keeps one of its own."""
    if len(prompts) < 2:
        return 0
    limit = min(len(p) for p in prompts) - 1
    first = prompts[0]
    n = next((i for i in range(limit) if any(p[i] != first[i] for p in prompts)), limit)
    return n if n >= HEADER_TOKENS else 0
