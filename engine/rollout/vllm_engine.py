"""vLLM's engine, driven step by step inside the sampler process: what a CPU uses."""

from __future__ import annotations

import time
from typing import Any

import vllm
from vllm import LLM, SamplingParams, TokensPrompt

from engine.rollout.book import Book
from engine.rollout.messages import SamplerConfig
from engine.rollout.requests import (
    SCORE_PRIORITY,
    adapter_of,
    engine_arguments,
    require_alone,
    score_params,
    scores_of,
    slowest,
)
from engine.types import Completion


class VllmEngine:
    """One vLLM with the weights of one policy version."""

    def __init__(self, config: SamplerConfig) -> None:
        self.version = vllm.__version__
        self.book = Book(text=config.tokenizer)
        self._config = config
        self._adapter = adapter_of(config)
        self._llm = LLM(**engine_arguments(config))
        self._rpc("rlvr_open", config.model_dir)
        self._label(0)

    def step(self) -> list[Completion]:
        """One engine step; the completions that finished in it."""
        self._advance()
        return self.book.take()

    def abort(self, groups: tuple[int, ...]) -> None:
        """Drop what is left of the groups; none of it comes out of `step` any more."""
        self._llm.llm_engine.abort_request(self.book.drop(groups))

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-prob of every token but the first under the installed weights, at temperature 1.

        What is being sampled goes on meanwhile; RuntimeError where vLLM can't do both.
        """
        require_alone(self._config, self.book.unfinished)
        name = self.book.name()
        self._add(name, token_ids, score_params(), SCORE_PRIORITY)
        while not (answers := [out for out in self._advance() if out.request_id == name]):
            pass
        return scores_of(answers[0], token_ids)

    def bind(self, address: dict[str, Any]) -> int:
        """Attach to the trainer's tensors and find the place of each in the model; how many names were bound."""
        return int(min(self._rpc("rlvr_bind", address, self._config.install)))

    def fetch(self, meeting: dict[str, Any] | None) -> str:
        """Take what the trainer sends or has written; why a worker got nothing, or nothing. No weight changes."""
        return next(filter(None, self._llm.collective_rpc("rlvr_fetch", args=(meeting,))), "")

    def install(self, version: int) -> dict[str, float]:
        """Write the fetched tensors into the model in place and drop the KV of the old weights; seconds by phase.

        Requests in the middle keep their tokens: vLLM preempts them and computes them again under the new weights.
        """
        seconds = slowest(self._rpc("rlvr_install"))
        start = time.perf_counter()
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(f"install of version {version}: vLLM did not drop its prefix cache")
        self.book.forget_cache()
        self._label(version)
        return seconds | {"kv": time.perf_counter() - start}

    def _advance(self) -> list[Any]:
        for name, group, params in self.book.admit():
            self._add(name, group.prompt_ids, params, priority=0)
        finished = [out for out in self._llm.llm_engine.step() if out.finished]
        for out in finished:
            self.book.land(out.request_id, out)
        return finished

    def _add(self, name: str, token_ids: tuple[int, ...], params: SamplingParams, priority: int) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        # Requests queue by their order, not by the wall clock, which may be set back in between.
        self._llm.llm_engine.add_request(
            name, prompt, params, arrival_time=float(name), lora_request=self._adapter, priority=priority
        )

    def _rpc(self, method: str, *args: object) -> list[Any]:
        """Each worker's answer: one, or as many as the model is split over."""
        answers: list[Any] = self._llm.collective_rpc(method, args=args)
        return answers

    def _label(self, version: int) -> None:
        """Have vLLM note which tokens are sampled from now on as those of `version`."""
        self._llm.llm_engine.set_weight_version(str(version))
