"""What several rooms' tests need: tiny random models and completions."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
from hypothesis import settings

from engine.types import Completion, Graded
from sandbox import Verdict

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: the short ones then fill up what is left when the last long one runs."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped heads and a tied head, saved as a Hugging Face folder without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def completion(group: int, member: int, prompt: tuple[int, ...], ids: tuple[int, ...], **changes: object) -> Completion:
    """A completion with made-up log-probs."""
    values: dict[str, object] = {
        "task_id": f"task-{group}",
        "group": group,
        "member": member,
        "prompt_ids": prompt,
        "token_ids": ids,
        "logprobs": tuple(-1.0 - 0.1 * i for i in range(len(ids))),
        "finish": "stop",
        "version": 0,
        "text": "",
    }
    return Completion(**(values | changes))  # type: ignore[arg-type]


def graded(item: Completion, reward: float | None) -> Graded:
    """A graded completion whose verdict suits its reward."""
    name = "INFRA" if reward is None else "AC" if reward == 1 else "WA"
    return Graded(item, "", Verdict(name, 0, 1), reward, {})
