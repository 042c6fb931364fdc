"""vLLM's engine, driven step by step inside the sampler process."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import vllm
from vllm import LLM, SamplingParams, TokensPrompt

from engine.rollout.admission import Admission
from engine.rollout.messages import Group, SamplerConfig, Sampling
from engine.types import Completion

BLOCK_SIZE = 32
"""Tokens of a KV block; the smallest that vLLM's CPU attention takes."""
STEP_TOKENS = 2048
EXTENSION = "engine.sync.extension.WorkerExtension"


class VllmEngine:
    """One vLLM with the weights of one policy version."""

    def __init__(self, config: SamplerConfig) -> None:
        self.version = vllm.__version__
        self._policy_version = 0
        self._requests: dict[str, tuple[Group, int, int]] = {}
        self._names = itertools.count()
        self._admission = Admission(BLOCK_SIZE, STEP_TOKENS)
        self._llm = LLM(
            model=config.model_dir,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_sequences,
            max_num_batched_tokens=max(STEP_TOKENS, config.max_model_len),
            # In chunks, a seeded request dies on a CPU (vLLM 0.32 rewinds its generator, which a CPU one can't).
            enable_chunked_prefill=config.device != "cpu",
            block_size=BLOCK_SIZE,
            seed=config.seed,
            enforce_eager=config.device == "cpu",
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=EXTENSION,
            disable_log_stats=True,
            **_memory(config),
        )
        self._rpc("rlvr_open", config.model_dir)

    @property
    def busy(self) -> bool:
        """Something is being sampled or waits for it."""
        return bool(self._requests) or len(self._admission) > 0

    def submit(self, groups: tuple[Group, ...]) -> None:
        """Queue groups; their completions come out of `step`, each as it finishes."""
        for group in groups:
            self._admission.add(group)

    def step(self) -> list[Completion]:
        """One engine step; the completions that finished in it."""
        for group, member in self._admission.next_wave():
            name = str(next(self._names))
            self._requests[name] = (group, member, self._policy_version)
            self._llm.llm_engine.add_request(
                name,
                TokensPrompt(prompt_token_ids=list(group.prompt_ids)),
                _params(group.sampling, group.seeds[member]),
            )
        return [self._completion(out) for out in self._llm.llm_engine.step() if out.finished]

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-prob of every token but the first under the installed weights, at temperature 1.

        Raises RuntimeError while requests are running, which would be in the way of the answer.
        """
        if self.busy:
            raise RuntimeError("score: groups are still being sampled")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        [out] = self._llm.generate(TokensPrompt(prompt_token_ids=list(token_ids)), params, use_tqdm=False)
        rows: Any = out.prompt_logprobs
        return tuple(row[token].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True))

    def bind(self, address: dict[str, Any]) -> int:
        """Map the shared factors and find the place of each in the model; the number of factor pairs bound."""
        return int(self._rpc("rlvr_bind", address))

    def install(self, version: int) -> dict[str, float]:
        """Write the shared factors into the model in place and drop the KV of the old weights; seconds by phase."""
        seconds: dict[str, float] = self._rpc("rlvr_install", version)
        start = time.perf_counter()
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(f"install of version {version}: vLLM did not drop its prefix cache")
        self._admission.forget()
        self._policy_version = version
        return seconds | {"kv": time.perf_counter() - start}

    def _rpc(self, method: str, *args: object) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def _completion(self, out: Any) -> Completion:
        group, member, version = self._requests.pop(out.request_id)
        [sample] = out.outputs
        logprobs = tuple(row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True))
        return Completion(
            task_id=group.task_id,
            group=group.group,
            member=member,
            prompt_ids=group.prompt_ids,
            token_ids=tuple(sample.token_ids),
            logprobs=logprobs,
            finish=sample.finish_reason,
            version=version,
            text=sample.text,
        )


def _params(sampling: Sampling, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        seed=seed,
        logprobs=0,
    )


def _memory(config: SamplerConfig) -> dict[str, Any]:
    if config.device == "cpu":
        return {"kv_cache_memory_bytes": config.kv_cache_mb << 20}
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"gpu_memory_utilization": config.gpu_memory_fraction}
