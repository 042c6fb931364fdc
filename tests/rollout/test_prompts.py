from __future__ import annotations

import pytest

from engine.errors import InputError
from engine.rollout.prompts import render_prompts
from engine.types import Task
from sandbox import StdinTests


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **arguments: object) -> str:
        assert arguments == {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def task(prompt: object) -> Task:
    return Task("t", prompt, StdinTests(()))  # type: ignore[arg-type]


def test_raw_text_stands_as_it_is() -> None:
    assert render_prompts([task("ab")], Letters(), style="raw", template={}, limit=9) == [(97, 98)]


@pytest.mark.parametrize("prompt", ["hi", ({"role": "user", "content": "hi"},)])
def test_chat_goes_through_the_template_with_its_arguments(prompt: object) -> None:
    [ids] = render_prompts([task(prompt)], Letters(), style="chat", template={"enable_thinking": False}, limit=99)
    assert "".join(map(chr, ids)) == "<user>hi<assistant>"


def test_chat_messages_in_raw_style_and_long_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="chat"):
        render_prompts([task(({"role": "user", "content": "hi"},))], Letters(), style="raw", template={}, limit=9)
    with pytest.raises(InputError, match="max_prompt_tokens is 3"):
        render_prompts([task("long")], Letters(), style="raw", template={}, limit=3)
