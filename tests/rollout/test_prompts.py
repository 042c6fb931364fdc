from __future__ import annotations

import pytest

from engine.errors import InputError
from engine.recipe import Tasks
from engine.recipe_file import RecipeError, parse
from engine.rollout.prompts import render_prompts
from engine.types import Prompt, Task
from sandbox import StdinTests


class Letters:
    """A tokenizer of one token a letter whose template opens a thought, or an empty one."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool, enable_thinking: bool = True
    ) -> str:
        assert not tokenize
        said = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        if not add_generation_prompt:
            return said
        return said + "<assistant>" + ("<think>" if enable_thinking else "<think></think>")


def task(prompt: object, starter: str = "") -> Task:
    return Task("t", prompt, StdinTests(()), starter=starter)  # type: ignore[arg-type]


def text_of(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.ids))


def one(prompt: object, **how: object) -> Prompt:
    return render_prompts([task(prompt)], Letters(), Tasks(train="t", prompt="chat", **how), 999)[0]  # type: ignore[arg-type]


def test_raw_text_stands_as_it_is() -> None:
    assert render_prompts([task("ab", "b")], Letters(), Tasks(train="t"), 9) == [Prompt((97, 98))]


@pytest.mark.parametrize("prompt", ["hi", ({"role": "user", "content": "hi"},)])
def test_chat_goes_through_the_template_with_its_arguments(prompt: object) -> None:
    off = one(prompt, chat_template={"enable_thinking": False})
    assert (text_of(off), off.opening) == ("<user>hi<assistant><think></think>", "<assistant><think></think>")
    on = one(prompt, chat_template={"enable_thinking": True})
    assert (text_of(on), on.opening) == ("<user>hi<assistant><think>", "<assistant><think>")


def test_system_suffix_and_prefill_have_their_places() -> None:
    found = one("hi", system="be short", suffix="\n\n/no_think", prefill="```python\n")
    assert text_of(found) == "<system>be short<user>hi\n\n/no_think<assistant><think>```python\n"
    assert found.opening == "<assistant><think>```python\n"


def test_a_second_system_message_and_a_suffix_without_a_place_are_refused() -> None:
    with pytest.raises(InputError, match=r"tasks\.system"):
        one(({"role": "system", "content": "x"}, {"role": "user", "content": "hi"}), system="y")
    with pytest.raises(InputError, match=r"tasks\.suffix"):
        one(({"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}), suffix="y")


def test_chat_messages_in_raw_style_starters_in_chat_style_and_long_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="chat"):
        render_prompts([task(({"role": "user", "content": "hi"},))], Letters(), Tasks(train="t"), 9)
    with pytest.raises(InputError, match="starter"):
        render_prompts([task("hi", "hi")], Letters(), Tasks(train="t", prompt="chat"), 99)
    with pytest.raises(InputError, match="max_prompt_tokens is 3"):
        render_prompts([task("long")], Letters(), Tasks(train="t"), 3)


@pytest.mark.parametrize("key", ["system", "suffix", "prefill"])
def test_words_for_a_chat_are_refused_in_a_raw_recipe(key: str) -> None:
    table = {"run": {"name": "t", "steps": 1}, "model": {"source": "m"}, "tasks": {"train": "t", key: "x"}}
    with pytest.raises(RecipeError, match=rf"tasks\.{key}"):
        parse(table)
