"""A sampler with a tiny random model, and how far its log-probs are from those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from engine.rollout import Child, Sampler
from engine.rollout.deliver import deliver
from engine.rollout.messages import Installed
from engine.sync import CollectiveTensors, SharedTensors, open_transport
from engine.sync.transport import Tensors
from engine.sync.ways import Way
from engine.types import Completion
from tests.rollout.tiny import SCALE, config, group, logprobs, make_model, merged

CLOSE = 1e-4
"""Nats; fp32 on both sides."""
FAR = 0.1
TEXT = tuple(range(3, 90))
LONG = 1500
"""Tokens of a completion in whose middle a version is installed, seconds of sampling."""


@dataclass(slots=True)
class Bench:
    """The sampler, its base model's folder, and the transport of what was bound last."""

    sampler: Sampler
    folder: Path
    memory: SharedTensors | CollectiveTensors | None = None

    def bind(self, tensors: Tensors, way: Way = "shared_memory") -> int:
        if self.memory is not None:
            self.memory.close()
        shapes = {name: tuple(t.shape for t in group) for name, group in tensors.items()}
        self.memory = open_transport(way, shapes, SCALE, "float32", "cpu")
        return self.sampler.bind(self.memory.address)

    def install(self, tensors: Tensors, version: int) -> dict[str, float]:
        assert self.memory is not None
        self.memory.write(tensors)
        [answer] = deliver(self.memory, [self.sampler], version)
        assert isinstance(answer, Installed), answer
        assert not answer.missed, answer.missed
        return answer.seconds

    def gap(self, model: PreTrainedModel) -> float:
        """Largest difference of a token's log-prob between the sampler and transformers, in nats."""
        theirs = self.sampler.score(TEXT)
        return max(abs(a - b) for a, b in zip(theirs, logprobs(model, TEXT), strict=True))


@contextmanager
def bench(folder: Path, *, tied: bool = True, **changes: object) -> Iterator[Bench]:
    model = make_model(folder / "model", tied=tied)
    opened = Bench(Sampler(config(model, **changes), Child("cpu", threads=1, log=folder / "log")), model)
    try:
        opened.sampler.wait_ready()
        yield opened
    finally:
        opened.sampler.close()
        if opened.memory is not None:
            opened.memory.close()


def gaps(completion: Completion, model: PreTrainedModel, start: int, end: int) -> list[float]:
    """Differences from a model of the completion's log-probs, tokens `start` to `end`."""
    expected = logprobs(model, (*completion.prompt_ids, *completion.token_ids))[len(completion.prompt_ids) - 1 :]
    return [abs(a - b) for a, b in zip(completion.logprobs[start:end], expected[start:end], strict=True)]


def check_noise(found: list[float]) -> None:
    """Rounding alone: 4e-6 on average; among thousands of tokens one may be off by 1e-4 where attention is sharp."""
    assert sum(found) / len(found) < 1e-5
    assert max(found) < 5e-4


def check_install_in_the_middle(bench: Bench, old: Tensors, new: Tensors) -> None:
    """Tokens before the boundary are the old weights', tokens after it the new ones'; nothing stands still."""
    bench.install(old, 5)
    bench.sampler.submit([group(1, 4, tokens=LONG), group(2, 4, tokens=LONG), group(3, 1, tokens=30)])
    [short] = bench.sampler.landed(1)  # so the others have some 30 tokens
    assert (short.group, short.version, short.boundaries) == (3, 5, ())
    bench.install(new, 6)
    old_model, new_model = merged(bench.folder, old), merged(bench.folder, new)
    assert bench.gap(new_model) < CLOSE  # the canary, with all the others in the middle
    landed = list(bench.sampler.landed(8))
    assert {(c.group, c.member) for c in landed} == {(g, m) for g in (1, 2) for m in range(4)}
    for completion in landed:
        assert completion.version == 5
        [(boundary, version)] = completion.boundaries
        assert version == 6
        assert 0 < boundary < len(completion.token_ids) == LONG
        first, end = max(0, boundary - 200), min(LONG, boundary + 200)
        check_noise(gaps(completion, old_model, first, boundary))
        check_noise(gaps(completion, new_model, boundary, end))
        assert max(gaps(completion, old_model, boundary, end)) > FAR
