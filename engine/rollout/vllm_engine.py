"""vLLM's engine, driven step by step inside the sampler process."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from engine.rollout.admission import Admission
from engine.rollout.messages import Group, SamplerConfig, Sampling
from engine.types import Completion

BLOCK_SIZE = 32
"""Tokens of a KV block; the smallest that vLLM's CPU attention takes."""
STEP_TOKENS = 2048
EXTENSION = "engine.sync.extension.WorkerExtension"
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes LoRA slots of."""
ADAPTER_ID = 1
"""As `engine.sync` makes it known inside the worker, empty."""
NO_FILE = "written in place"
"""A LoRARequest must name a folder; ours is never read, since the adapter is active before the first request."""


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
        self._adapter = LoRARequest("policy", ADAPTER_ID, NO_FILE) if config.install == "adapter" else None
        self._llm = LLM(
            model=config.model_dir,
            skip_tokenizer_init=not config.tokenizer,
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
            scheduling_policy="priority",  # the canary goes ahead of the groups that are being sampled
            logprobs_mode="processed_logprobs",
            worker_extension_cls=EXTENSION,
            disable_log_stats=True,
            **_memory(config),
            **_lora(config),
        )
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

        What is being sampled goes on meanwhile. Raises RuntimeError for an adapter with factors of the output head
        in that case: vLLM 0.32 adds them to a prompt's logits by the rows of what is sampled, so it must be alone.
        """
        if self.unfinished and "lm_head" in self._config.lora_targets:
            raise RuntimeError(
                f"score: {self.unfinished} completions are unfinished, and with an adapter on lm_head vLLM can only "
                f"score when it does nothing else; let them land or abort them first"
            )
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"score-{next(self._names)}"
        self._add(name, token_ids, params, priority=-1)
        while not (answers := [out for out in self._advance() if out.request_id == name]):
            pass
        rows: Any = answers[0].prompt_logprobs
        return tuple(row[token].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True))

    def bind(self, address: dict[str, Any]) -> int:
        """Attach to the trainer's tensors and find the place of each in the model; how many names were bound."""
        return int(self._rpc("rlvr_bind", address, self._config.install))

    def fetch(self, meeting: dict[str, Any] | None) -> str:
        """Take what the trainer sends or has written; why a worker got nothing, or nothing. No weight changes."""
        return next(filter(None, self._llm.collective_rpc("rlvr_fetch", args=(meeting,))), "")

    def install(self, version: int) -> dict[str, float]:
        """Write the fetched tensors into the model in place and drop the KV of the old weights; seconds by phase.

        Requests in the middle keep their tokens: vLLM preempts them and computes them again under the new weights.
        """
        seconds: dict[str, float] = self._rpc("rlvr_install")
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
            self._add(name, group.prompt_ids, _params(group.sampling, group.seeds[member], self._config.tokenizer))
        finished = [out for out in self._llm.llm_engine.step() if out.finished]
        self._finished += [self._completion(out) for out in finished if out.request_id in self._requests]
        return finished

    def _add(self, name: str, token_ids: tuple[int, ...], params: SamplingParams, priority: int = 0) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        self._llm.llm_engine.add_request(name, prompt, params, lora_request=self._adapter, priority=priority)

    def _rpc(self, method: str, *args: object) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def _label(self, version: int) -> None:
        """Have vLLM note which tokens are sampled from now on as those of `version`."""
        self._llm.llm_engine.set_weight_version(str(version))

    def _completion(self, out: Any) -> Completion:
        group, member = self._requests.pop(out.request_id)
        [sample] = out.outputs
        logprobs = tuple(row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True))
        self.tokens += len(logprobs)
        first, *later = sample.weight_versions
        return Completion(
            task_id=group.task_id,
            group=group.group,
            member=member,
            prompt_ids=group.prompt_ids,
            token_ids=tuple(sample.token_ids),
            logprobs=logprobs,
            finish=sample.finish_reason,
            version=int(first.version),
            text=sample.text,
            boundaries=tuple((span.start, int(span.version)) for span in later),
        )


def _params(sampling: Sampling, seed: int, tokenizer: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        seed=seed,
        logprobs=0,
        detokenize=tokenizer,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _lora(config: SamplerConfig) -> dict[str, Any]:
    if config.install == "merged":
        return {}
    rank = next((rank for rank in SLOT_RANKS if rank >= config.lora_rank), None)
    if config.lora_rank < 1 or rank is None:
        raise ValueError(f"an adapter of rank {config.lora_rank}: vLLM's slots take 1 to {SLOT_RANKS[-1]}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": list(config.lora_targets) or None,
        "lora_dtype": "auto",
    }


def _memory(config: SamplerConfig) -> dict[str, Any]:
    if config.device == "cpu":
        return {"kv_cache_memory_bytes": config.kv_cache_mb << 20}
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"gpu_memory_utilization": config.gpu_memory_fraction}
