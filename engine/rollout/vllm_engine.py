"""vLLM's engine, driven step by step inside the sampler process: what a CPU uses."""

from __future__ import annotations

import itertools
import time
from typing import Any

import vllm
from vllm import LLM, SamplingParams, TokensPrompt

from engine.rollout.admission import Admission
from engine.rollout.messages import Group, SamplerConfig
from engine.rollout.requests import (
    BLOCK_SIZE,
    SCORE_PRIORITY,
    STEP_TOKENS,
    adapter_of,
    completion_of,
    engine_arguments,
    require_alone,
    sampling_params,
    score_params,
    scores_of,
    slowest,
)
from engine.types import Completion


class VllmEngine:
    """One vLLM with the weights of one policy version."""

    def __init__(self, config: SamplerConfig) -> None:
        self.version = vllm.__version__
        self.tokens = 0
        """Sampled in finished completions."""
        self._config = config
        self._requests: dict[str, tuple[Group, int]] = {}
        self._finished: list[Completion] = []
        self._names = itertools.count()
        self._admission = Admission(BLOCK_SIZE, STEP_TOKENS)
        self._adapter = adapter_of(config)
        self._llm = LLM(**engine_arguments(config))
        self._rpc("rlvr_open", config.model_dir)
        self._label(0)

    @property
    def unfinished(self) -> int:
        """Completions that are being sampled, wait for it, or have not been handed out by `step`."""
        return len(self._requests) + len(self._admission) + len(self._finished)

    def submit(self, groups: tuple[Group, ...]) -> None:
        """Queue groups; their completions come out of `step`, each as it finishes."""
        for group in groups:
            self._admission.add(group)

    def step(self) -> list[Completion]:
        """One engine step; the completions that finished in it."""
        self._advance()
        landed, self._finished = self._finished, []
        return landed

    def abort(self, groups: tuple[int, ...]) -> None:
        """Drop what is left of the groups; none of it comes out of `step` any more."""
        self._admission.drop(groups)
        self._finished = [c for c in self._finished if c.group not in groups]
        names = [name for name, (group, _) in self._requests.items() if group.group in groups]
        self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._requests[name]

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-prob of every token but the first under the installed weights, at temperature 1.

        What is being sampled goes on meanwhile; RuntimeError where vLLM can't do both.
        """
        require_alone(self._config, self.unfinished)
        name = f"score-{next(self._names)}"
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
        self._admission.forget()
        self._label(version)
        return seconds | {"kv": time.perf_counter() - start}

    def _advance(self) -> list[Any]:
        for group, member in self._admission.next_wave():
            name = str(next(self._names))
            self._requests[name] = (group, member)
            params = sampling_params(group.sampling, group.seeds[member], text=self._config.tokenizer)
            self._add(name, group.prompt_ids, params, priority=0)
        finished = [out for out in self._llm.llm_engine.step() if out.finished]
        for out in finished:
            if (asked := self._requests.pop(out.request_id, None)) is not None:
                completion = completion_of(out, *asked)
                self.tokens += len(completion.token_ids)
                self._finished.append(completion)
        return finished

    def _add(self, name: str, token_ids: tuple[int, ...], params: SamplingParams, priority: int) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        self._llm.llm_engine.add_request(name, prompt, params, lora_request=self._adapter, priority=priority)

    def _rpc(self, method: str, *args: object) -> list[Any]:
        """Each worker's answer: one, or as many as the model is split over."""
        answers: list[Any] = self._llm.collective_rpc(method, args=args)
        return answers

    def _label(self, version: int) -> None:
        """Have vLLM note which tokens are sampled from now on as those of `version`."""
        self._llm.llm_engine.set_weight_version(str(version))
