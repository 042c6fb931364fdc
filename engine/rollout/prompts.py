"""Tasks to token ids: the one place where a prompt's text becomes tokens, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InputError
from engine.types import Task


def render_prompts(
    tasks: Sequence[Task], tokenizer: Any, *, style: str, template: Mapping[str, Any], limit: int
) -> list[tuple[int, ...]]:
    """Token ids of each task's prompt: `raw` text as it stands, `chat` through the model's template.

    Raises InputError where a task's prompt does not suit the style or is longer than `limit` tokens.
    """
    rendered = []
    for task in tasks:
        if style == "chat":
            messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
            text = tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **template
            )
        elif isinstance(task.prompt, str):
            text = task.prompt
        else:
            raise InputError(f'task {task.id} has chat messages: set tasks.prompt = "chat"')
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 0 < len(ids) <= limit:
            raise InputError(f"task {task.id}: its prompt has {len(ids)} tokens, rollout.max_prompt_tokens is {limit}")
        rendered.append(ids)
    return rendered
