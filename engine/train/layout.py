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


def pack(trained: Sequence[Trained], token_budget: int) -> list[Batch]:
    """Cut completions into micro-batches of about `token_budget` forward tokens and pack each.

    Completions of one group stay together as long as the budget allows; a completion longer than the budget gets a
    micro-batch of its own.
    """
    return [_pack_one(part) for part in _cut(trained, token_budget)]


def _cut(trained: Sequence[Trained], token_budget: int) -> list[list[Trained]]:
    parts: list[list[Trained]] = []
    tokens, groups = 0, set[int]()
    for item in sorted(trained, key=lambda t: t.completion.group):
        completion = item.completion
        cost = len(completion.token_ids) - 1
        prompt = 0 if completion.group in groups else len(completion.prompt_ids)
        if not parts or tokens + cost + prompt > token_budget:
            parts.append([])
            tokens, groups, prompt = 0, set(), len(completion.prompt_ids)
        parts[-1].append(item)
        tokens += cost + prompt
        groups.add(completion.group)
    return parts


def _pack_one(trained: Sequence[Trained]) -> Batch:
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
    targets: list[int] = []
    sampled: list[float] = []
    advantages: list[float] = []
    sequences: list[int] = []
    for item in trained:
        completion, rows = item.completion, item.rows
        last_of_prompt = starts[prompt_segment[completion.group] + 1] - 1
        first = len(ids)
        if len(completion.token_ids) > 1:  # the last token predicts nothing, so it is never fed
            segment(completion.token_ids[:-1], prompt_segment[completion.group])
        predictors += [last_of_prompt if i == 0 else first + i - 1 for i in rows]
        targets += [completion.token_ids[i] for i in rows]
        sampled += [completion.logprobs[i] for i in rows]
        advantages += [item.advantage] * len(rows)
        sequences += [item.sequence] * len(rows)
    return Batch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        layout=Layout(tuple(starts), tuple(prefixes)),
        predictors=torch.tensor(predictors, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        sampled_logprobs=torch.tensor(sampled, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        sequences=torch.tensor(sequences, dtype=torch.int64),
    )


def _common_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with, 0 if too few to be worth a segment; every prompt keeps one of its own."""
    if len(prompts) < 2:
        return 0
    limit = min(len(p) for p in prompts) - 1
    first = prompts[0]
    n = next((i for i in range(limit) if any(p[i] != first[i] for p in prompts)), limit)
    return n if n >= HEADER_TOKENS else 0
