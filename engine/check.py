"""`rlvr check`: is the adapter that vLLM serves the one that was trained? Log-probs of the same tokens, both ways."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from engine import recipe_file
from engine.errors import InputError, RunError
from engine.recipe import Lora, Tasks
from engine.record.trained import Trained, base_of, by_base_names, outline, read
from engine.rollout import render_prompts
from engine.rollout.served import Scores, Served, serve
from engine.snapshot import Snapshot
from engine.tasks import load_tasks
from engine.train.policy import Policy
from engine.types import Factors, Task

CLEARLY = 0.25
"""The served adapter may differ from the trainer's by this share of what the adapter changes, at most."""
ABSENT = 0.1
"""A served adapter that changes less than this share of what it changes in the trainer is not applied."""
ABOVE_ROUNDING = 4.0
"""What the adapter changes must be so many times what trainer and vLLM differ by on the base alone."""
TEXT_TOKENS = 256
"""Longest text; longer ones are cut."""
TEXTS = (
    "Write a Python function that returns the n-th Fibonacci number.\n\n```python\ndef fibonacci(n):\n    a, b = 0, 1\n"
    "    for _ in range(n):\n        a, b = b, a + b\n    return a\n```\n",
    "Read an integer n and then n integers, one a line. Print their sum and their largest.\n\n```python\n"
    "n = int(input())\nvalues = [int(input()) for _ in range(n)]\nprint(sum(values), max(values))\n```\n",
    "To find out whether a number is prime, try every divisor up to its square root: if none divides it, it is prime. "
    "For 91 we try 2, 3, 5 and 7, and since 7 times 13 is 91, it is not.",
    'def is_palindrome(text: str) -> bool:\n    """Whether the letters of text read the same both ways."""\n'
    "    letters = [c.lower() for c in text if c.isalnum()]\n    return letters == letters[::-1]\n",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two ways to score the same tokens, in nats a token."""

    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found."""

    tokens: int
    layers: int
    """That the adapter has factors for."""
    served: Served
    gap: Difference
    """The served adapter against the trainer's."""
    rounding: Difference
    """The served base against the trainer's."""
    trained_change: Difference
    """Adapter against base in the trainer."""
    served_change: Difference
    """Adapter against base as served."""

    @property
    def missing(self) -> int:
        """Layers of the file that vLLM did not even read."""
        return self.layers - len(self.served.bound) - len(self.served.unplaced)

    def lines(self) -> list[str]:
        """The table."""
        rows = (
            ("adapter: served against trainer", self.gap),
            ("base: served against trainer", self.rounding),
            ("trainer: adapter against base", self.trained_change),
            ("served: adapter against base", self.served_change),
        )
        table = [f"{name:34}{row.mean:12.3g}{row.largest:12.3g}" for name, row in rows]
        return [
            f"tensors: {2 * self.layers} in the file, {2 * len(self.served.bound)} bound by vLLM, "
            f"{2 * len(self.served.unplaced)} unexpected, {2 * self.missing} missing",
            f"{f'|difference|, {self.tokens} tokens':34}{'mean':>12}{'max':>12}  nats a token",
            *table,
        ]

    def failure(self) -> str | None:
        """Why the served adapter is not the trained one, or why that can't be told; None where it is."""
        if self.served.refused:
            return f"vLLM refuses the adapter: {self.served.refused}"
        share = (
            f"it changes {self.served_change.mean:.3g} nats a token as served, {self.trained_change.mean:.3g} in the "
            f"trainer"
        )
        lost = [*self.served.unplaced, *(["(unnamed)"] if self.missing else [])]
        if lost:
            how = "not applied" if not self.served.bound else "applied in part"
            return (
                f"the adapter is {how}: {len(self.served.unplaced) + self.missing} of its {self.layers} layers have "
                f"no place in vLLM's model, such as {lost[0]}; {share}. For a model with vision vLLM wants "
                f"`rlvr export --prefix model.language_model.layers`, for one of text alone `--prefix model.layers`"
            )
        if not self.trained_change.mean > ABOVE_ROUNDING * self.rounding.mean:
            return (
                f"nothing can be told: the adapter changes {self.trained_change.mean:.3g} nats a token, trainer and "
                f"vLLM differ by {self.rounding.mean:.3g} on the base alone; check a step that was trained for longer"
            )
        if not self.served_change.mean > ABSENT * self.trained_change.mean:
            return f"the adapter is not applied: {share}"
        if not self.gap.mean <= CLEARLY * self.trained_change.mean:
            return (
                f"the served adapter is another one: it differs from the trainer's by {self.gap.mean:.3g} nats a "
                f"token, and the whole adapter changes only {self.trained_change.mean:.3g}"
            )
        return None


def check(
    run: Path,
    *,
    step: int | None = None,
    source: str | None = None,
    any_base: bool = False,
    tasks: str | None = None,
    tokens: int = 512,
    device: str = "cpu",
    dtype: str = "float32",
) -> Checked:
    """Compare what vLLM serves from the adapter's folder with the trainer, on about `tokens` tokens.

    `device` is where both compute, one after the other; `dtype` is the served model's, the trainer computes in fp32.
    Raises InputError for an adapter or base that does not fit, RunError where vLLM fails.
    """
    trained = read(run, step)
    if trained.factors is None:
        raise InputError(f"{trained.folder} holds whole weights; there is no adapter to check")
    base = base_of(trained, source, any_base=any_base)
    factors = by_base_names(trained, base, outline(base.folder))
    texts = _texts(base, trained, tasks, tokens)
    return check_texts(base, trained, factors, [trained.folder], texts, device=device, dtype=dtype)[0]


def check_texts(
    base: Snapshot,
    trained: Trained,
    factors: Factors,
    folders: Sequence[Path],
    texts: Sequence[Sequence[int]],
    *,
    device: str,
    dtype: str,
) -> list[Checked]:
    """Compare each folder of `folders`, all served by one vLLM, with the trainer's `factors`, on token ids `texts`."""
    threads = len(os.sched_getaffinity(0))
    ours, our_base = _trainer_scores(base, trained, factors, texts, device)
    scratch = Path(tempfile.mkdtemp(prefix="rlvr-check-"))
    try:
        served_base, answers = serve(
            base.folder,
            folders,
            texts,
            rank=int(trained.config["r"]),
            device=device,
            dtype=dtype,
            threads=threads,
            scratch=scratch,
        )
    except RunError as error:
        raise RunError(f"{error}; its log: {scratch / 'vllm.log'}") from None
    shutil.rmtree(scratch)
    return [
        Checked(
            tokens=sum(len(text) - 1 for text in texts),
            layers=len(factors),
            served=answer,
            gap=_difference(answer.scores, ours),
            rounding=_difference(served_base, our_base),
            trained_change=_difference(ours, our_base),
            served_change=_difference(answer.scores, served_base),
        )
        for answer in answers
    ]


@torch.no_grad()
def _trainer_scores(
    base: Snapshot, trained: Trained, factors: Factors, texts: Sequence[Sequence[int]], device: str
) -> tuple[Scores, Scores]:
    """Under the adapter and under the base alone; the policy is gone afterwards."""
    config = trained.config
    how = Lora(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        targets=tuple(factors),
    )
    policy = Policy(base.folder, dtype="float32", device=device, how=how, seed=0)
    for name, (a, b) in policy.adapter.factors().items():
        a.copy_(factors[name][0])
        b.copy_(factors[name][1])
    ours = tuple(policy.score(text) for text in texts)
    with policy.base_model():
        return ours, tuple(policy.score(text) for text in texts)


def _texts(base: Snapshot, trained: Trained, source: str | None, tokens: int) -> list[tuple[int, ...]]:
    """Token ids: tasks' prompts, each with its reference behind it, or the built-in texts, up to `tokens` in all."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base.folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{base.folder}: its tokenizer can't be loaded: {str(error).splitlines()[0]}") from None
    found: Iterator[tuple[int, ...]]
    if source is None:
        found = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS)
    else:
        found = _task_texts(load_tasks(source), tokenizer, trained.recipe)
    texts: list[tuple[int, ...]] = []
    for ids in found:
        left = tokens - sum(map(len, texts))
        if left < 2:
            break
        texts.append(ids[: min(TEXT_TOKENS, left)])
    return texts


def _task_texts(tasks: Sequence[Task], tokenizer: Any, recipe_path: Path | None) -> Iterator[tuple[int, ...]]:
    """Prompts as the run's recipe renders them, without one as chat where the model has a template."""
    if recipe_path is not None:
        how = recipe_file.load(recipe_path).tasks
    else:
        how = Tasks(train="", prompt="chat" if tokenizer.chat_template else "raw")
    for task in tasks:  # as many as are wanted: a set may be large
        [prompt] = render_prompts([task], tokenizer, how, limit=1 << 20)
        yield (*prompt.ids, *tokenizer(task.reference or "", add_special_tokens=False)["input_ids"])


def _difference(a: Scores, b: Scores) -> Difference:
    """NaN where there is nothing to compare."""
    pairs = [abs(x - y) for row, other in zip(a, b, strict=False) for x, y in zip(row, other, strict=True)]
    return Difference(sum(pairs) / len(pairs), max(pairs)) if pairs else Difference(float("nan"), float("nan"))
