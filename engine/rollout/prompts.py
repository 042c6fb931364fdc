"""Tasks to token ids: the one place where a prompt's text becomes tokens, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import InputError
from engine.recipe import Tasks
from engine.types import Message, Prompt, Task


def render_prompts(tasks: Sequence[Task], tokenizer: Any, how: Tasks, limit: int) -> list[Prompt]:
    """Each task's prompt: `raw` text as it stands, `chat` through the model's template.

    how: the recipe's `[tasks]`, of which the keys that say how a prompt is made are looked at.
    Raises InputError where a task's prompt does not suit the style or is longer than `limit` tokens.
    """
    rendered = []
    for task in tasks:
        text, opening = _chat(task, tokenizer, how) if how.prompt == "chat" else _raw(task)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 0 < len(ids) <= limit:
            raise InputError(f"task {task.id}: its prompt has {len(ids)} tokens, rollout.max_prompt_tokens is {limit}")
        rendered.append(Prompt(ids, opening))
    return rendered


def _raw(task: Task) -> tuple[str, str]:
    if not isinstance(task.prompt, str):
        raise InputError(f'task {task.id} has chat messages: set tasks.prompt = "chat"')
    return task.prompt, ""


def _chat(task: Task, tokenizer: Any, how: Tasks) -> tuple[str, str]:
    """The text, and the part of it that begins the answer."""
    if task.starter:
        raise InputError(
            f"task {task.id} is to be continued from its starter, which a chat message can't be: set tasks.prompt = "
            '"raw", or give its source another prompt style, such as ?prompt=evalplus'
        )
    messages = _messages(task, how)
    asked, begun = (
        tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=begin, **how.chat_template
        )
        for begin in (False, True)
    )
    if not begun.startswith(asked):
        raise InputError(f"task {task.id}: the model's chat template does not begin an answer at the messages' end")
    # What the template adds may open a thought, or open and close one: the grader must see that.
    return begun + how.prefill, begun.removeprefix(asked) + how.prefill


def _messages(task: Task, how: Tasks) -> list[Message]:
    """The task's messages with the recipe's system message before them and its suffix at their end."""
    given = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt)
    messages: list[Message] = list(given)
    if how.system and messages[0]["role"] == "system":
        raise InputError(f"task {task.id} has a system message of its own: leave tasks.system empty")
    if how.system:
        messages.insert(0, {"role": "system", "content": how.system})
    if how.suffix:
        last = messages[-1]
        if last["role"] != "user":
            raise InputError(f"task {task.id} does not end with a user's message: tasks.suffix has no place")
        messages[-1] = {**last, "content": last["content"] + how.suffix}
    return messages
