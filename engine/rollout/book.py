"""Where each completion of a sampler stands: the same for both ways of driving vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from vllm import SamplingParams

from engine.rollout.admission import Admission
from engine.rollout.messages import Group
from engine.rollout.requests import BLOCK_SIZE, STEP_TOKENS, completion_of, sampling_params
from engine.types import Completion


class Book:
    """Completions that wait to enter vLLM, that are in it under a request's name, and that are finished."""

    def __init__(self, *, text: bool) -> None:
        """text: whether completions have a text beside their tokens."""
        self.tokens = 0
        """Sampled in finished completions."""
        self._text = text
        self._waiting = Admission(BLOCK_SIZE, STEP_TOKENS)
        self._sampling: dict[str, tuple[Group, int]] = {}
        self._finished: list[Completion] = []
        self._numbers = itertools.count()

    @property
    def unfinished(self) -> int:
        """Completions that wait, are being sampled, or have not been handed out by `take`."""
        return len(self._waiting) + len(self._sampling) + len(self._finished)

    @property
    def waiting(self) -> int:
        """Completions that have not entered vLLM."""
        return len(self._waiting)

    @property
    def sampling(self) -> int:
        """Completions that vLLM is at."""
        return len(self._sampling)

    def add(self, groups: Sequence[Group]) -> None:
        """Queue every member of the groups that is asked for."""
        for group in groups:
            self._waiting.add(group)

    def name(self) -> str:
        """A name for a request of vLLM's: a number, which grows, so that it also says the order in which they came."""
        return str(next(self._numbers))

    def admit(self) -> Iterator[tuple[str, Group, SamplingParams]]:
        """What may enter before vLLM's next step, each under a name of its own; to be called once for each step."""
        for group, member in self._waiting.next_wave():
            name = self.name()
            self._sampling[name] = (group, member)
            yield name, group, sampling_params(group.sampling, group.seeds[member], text=self._text)

    def land(self, name: str, out: Any) -> None:
        """Note vLLM's answer to the request `name`, unless it is none of `admit` or was dropped."""
        if (asked := self._sampling.pop(name, None)) is not None:
            completion = completion_of(out, *asked)
            self.tokens += len(completion.token_ids)
            self._finished.append(completion)

    def drop(self, groups: Collection[int]) -> list[str]:
        """Forget what is left of the groups; the names of those that vLLM is at."""
        self._waiting.drop(groups)
        self._finished = [c for c in self._finished if c.group not in groups]
        names = [name for name, (group, _) in self._sampling.items() if group.group in groups]
        for name in names:
            del self._sampling[name]
        return names

    def take(self) -> list[Completion]:
        """The completions that have finished since the last call."""
        taken, self._finished = self._finished, []
        return taken

    def forget_cache(self) -> None:
        """vLLM's prefix cache was dropped: no prompt is computed any more."""
        self._waiting.forget()
