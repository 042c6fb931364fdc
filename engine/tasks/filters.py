"""Filters by what a prompt says: too long for the context, or part of a suite that must not be trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.tasks.duplicates import Shingles, words_of
from engine.tasks.prompt import statement_of
from engine.types import Task

SHARED_WORDS = 8  # in a row that make a task contaminated


@dataclass(frozen=True, slots=True)
class Contaminated:
    """A task that says as many words in a row as a suite's task does."""

    id: str
    suite: str
    other: str
    words: str


def short_enough(
    tasks: Sequence[Task], count_tokens: Callable[[Task], int], limit: int
) -> tuple[list[Task], list[tuple[str, int]]]:
    """The tasks whose prompt has at most `limit` tokens, and the ids and lengths of the others."""
    lengths = [count_tokens(task) for task in tasks]
    kept = [task for task, length in zip(tasks, lengths, strict=True) if length <= limit]
    return kept, [(task.id, length) for task, length in zip(tasks, lengths, strict=True) if length > limit]


def token_counter(folder: Path, *, chat: bool) -> Callable[[Task], int]:
    """Counts a task's prompt in the tokens of the model in `folder`, through its chat template if `chat`.

    Raises InputError where there is no tokenizer.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(f"no tokenizer could be loaded from {folder}: {str(error).splitlines()[0]}") from None

    def count(task: Task) -> int:
        prompt = task.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        text: Any = "\n".join(message["content"] for message in messages)
        if chat:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


def decontaminate(
    tasks: Sequence[Task], suites: Mapping[str, Sequence[Task]], words: int = SHARED_WORDS
) -> tuple[list[Task], list[Contaminated]]:
    """The tasks that share no `words` words in a row with any task of the suites, and the others.

    Statements are compared, without the words that every prompt of a format has. A statement of fewer words is
    compared as a whole.
    """
    shingle = Shingles(words)
    known: dict[int, tuple[str, str]] = {}
    for suite, theirs in suites.items():
        for task in theirs:
            for value in shingle(words_of(statement_of(task))).tolist():
                known.setdefault(value, (suite, task.id))
    kept, removed = [], []
    for task in tasks:
        listed = words_of(statement_of(task))
        places = enumerate(shingle.ordered(listed).tolist())
        hit = next(((place, known[value]) for place, value in places if value in known), None)
        if hit is None:
            kept.append(task)
        else:
            place, (suite, other) = hit
            removed.append(Contaminated(task.id, suite, other, " ".join(listed[place : place + words])))
    return kept, removed
