"""The memory that a step is said to take, against what it takes: every tensor that a real step makes is counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import RunError
from engine.train.memory import Allocations, Gauge, out_of_memory
from engine.train.step import Trainer
from tests.conftest import completion, graded
from tests.train.test_step import recipe_for

pytestmark = pytest.mark.slow
WAYS: dict[str, dict[str, object]] = {
    "lora": {},
    "checkpointing": {"train": {"checkpointing": True, "token_budget": 4096}},
    "full": {"lora": None, "full": {}},
    "cut": {"train": {"token_budget": 300}},
    "bf16": {"model": {"source": "t", "dtype": "bfloat16"}},
    "bf16 full": {"model": {"source": "t", "dtype": "bfloat16"}, "lora": None, "full": {}},
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose layers weigh more than what surrounds them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("wide-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


LENGTHS = {"long prompts": (60, 5), "long completions": (10, 90)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_prediction_is_within_15_percent(wide_model: Path, way: str, lengths: str) -> None:
    trainer = Trainer(recipe_for(**WAYS[way]), wide_model)
    trainer.require_room()
    prompt, answer = LENGTHS[lengths]
    data = [
        [
            graded(completion(g, m, tuple(range(g, g + prompt)), tuple(range(3 + g, 3 + g + answer + m))), float(m % 2))
            for m in range(4)
        ]
        for g in range(3)
    ]
    standing = [*trainer.policy.model.parameters(), *trainer.policy.model.buffers(), *trainer.policy.trained.parameters]
    weights = sum(t.numel() * t.element_size() for t in {id(t): t for t in standing}.values())
    with Allocations(standing) as allocations:
        trainer.step(data, trainer.advantages(data), 1)
        stats = trainer.step(data, trainer.advantages(data), 2)
    assert stats.memory_predicted_mb * 2**20 - weights == pytest.approx(allocations.peak(), rel=0.15)


def test_the_largest_budget_that_fits_is_found(wide_model: Path) -> None:
    memory = Trainer(recipe_for(), wide_model).require_room()
    free = 200 << 20
    tokens = memory.fitting_tokens(free)
    assert memory.peak_of(tokens, tokens) <= free < memory.peak_of(tokens + 1, tokens + 1)
    assert memory.fitting_tokens(memory.weights + memory.moments) == 0


def test_a_budget_that_cannot_fit_is_refused_with_one_that_does(wide_model: Path) -> None:
    with pytest.raises(RunError, match=r"train\.token_budget = 100000000 needs .* GiB are free: lower it to \d+"):
        Trainer(recipe_for(train={"token_budget": 100_000_000}), wide_model).require_room()


def test_the_gauge_sees_what_comes_and_goes() -> None:
    gauge = Gauge(torch.device("cpu"))
    gauge.clear()
    room = torch.ones(256 << 18)
    del room
    high = gauge.height_mb()
    gauge.clear()
    assert high - gauge.height_mb() == pytest.approx(256, abs=64)  # the kernel counts roughly


OUT_OF_MEMORY = """
import resource, sys
from pathlib import Path
from engine.train.step import Trainer
from tests.conftest import completion, graded
from tests.train.test_step import recipe_for

budget, room_mb = int(sys.argv[2]), int(sys.argv[3])
trainer = Trainer(recipe_for(train={"token_budget": budget}), Path(sys.argv[1]))
trainer.require_room()
data = [[graded(completion(g, m, (1, 2, 3), tuple(range(100)) * 4), float(m % 2)) for m in range(4)] for g in range(8)]
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, ((pages << 12) + (room_mb << 20), resource.RLIM_INFINITY))
trainer.step(data, trainer.advantages(data), 1)
"""


def test_a_step_that_runs_out_of_memory_says_what_to_lower(wide_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(wide_model), "8192", "40"],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    words = "train.token_budget = 8192: lower it to 4096, or set train.checkpointing = true; .*--resume"
    assert re.search(f"RunError: the trainer ran out of memory on cpu .*{words}", done.stderr), done.stderr


def test_a_completion_longer_than_the_budget_is_the_thing_to_shorten() -> None:
    recipe = recipe_for(train={"token_budget": 64, "checkpointing": True})
    error = out_of_memory("no memory", 403, recipe, None, torch.device("cpu"))
    assert "one completion with its prompt takes 403: lower rollout.max_tokens = 8; then" in str(error)
