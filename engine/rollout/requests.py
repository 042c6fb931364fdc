"""What both ways of driving vLLM say to it and hear from it: engine arguments, requests, completions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from engine.rollout.messages import Group, SamplerConfig, Sampling
from engine.types import LORA_SLOTS, Completion

BLOCK_SIZE = 32
"""Tokens of a KV block; the smallest that vLLM's CPU attention takes."""
STEP_TOKENS = 2048
SCORE_PRIORITY = -1
"""The canary goes ahead of the groups that are being sampled, which have 0."""
EXTENSION = "engine.sync.extension.WorkerExtension"
ADAPTER_ID = 1
"""As `engine.sync` makes it known inside the worker, empty."""
NO_FILE = "written in place"
"""A LoRARequest must name a folder; ours is never read, since the adapter is active before the first request."""


def engine_arguments(config: SamplerConfig) -> dict[str, Any]:
    """vLLM's own, for `LLM` and `AsyncEngineArgs` alike."""
    return {
        "model": config.model_dir,
        "skip_tokenizer_init": not config.tokenizer,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": max(STEP_TOKENS, config.max_model_len),
        # In chunks, a seeded request dies on a CPU (vLLM 0.32 rewinds its generator, which a CPU one can't).
        "enable_chunked_prefill": config.device != "cpu",
        "block_size": BLOCK_SIZE,
        "seed": config.seed,
        "enforce_eager": config.device == "cpu",
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        **_memory(config),
        **_lora(config),
    }


def adapter_of(config: SamplerConfig) -> LoRARequest | None:
    """What every request names where the factors stand in vLLM's slot."""
    return LoRARequest("policy", ADAPTER_ID, NO_FILE) if config.install == "adapter" else None


def sampling_params(sampling: Sampling, seed: int, *, text: bool) -> SamplingParams:
    """Of one completion; text: whether it has a text beside its tokens."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        seed=seed,
        logprobs=0,
        detokenize=text,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def score_params() -> SamplingParams:
    """Of a text that is only scored, at temperature 1."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scores_of(out: Any, token_ids: Sequence[int]) -> tuple[float, ...]:
    """From vLLM's answer to `score_params`: the log-prob of every token but the first."""
    return tuple(row[token].logprob for row, token in zip(out.prompt_logprobs[1:], token_ids[1:], strict=True))


def completion_of(out: Any, group: Group, member: int) -> Completion:
    """From vLLM's answer to `sampling_params`, with the versions that it labelled the tokens with."""
    [sample] = out.outputs
    first, *later = sample.weight_versions
    return Completion(
        task_id=group.task_id,
        group=group.group,
        member=member,
        prompt_ids=group.prompt_ids,
        token_ids=tuple(sample.token_ids),
        logprobs=tuple(row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True)),
        finish=sample.finish_reason,
        version=int(first.version),
        text=sample.text,
        boundaries=tuple((span.start, int(span.version)) for span in later),
    )


def require_alone(config: SamplerConfig, unfinished: int) -> None:
    """Raise RuntimeError where a text can't be scored beside what is being sampled.

    vLLM 0.32 adds an output head's factors to a prompt's logits by the rows of what is sampled.
    """
    if unfinished and config.install == "adapter" and "lm_head" in config.lora_targets:
        raise RuntimeError(
            f"score: {unfinished} completions are unfinished, and with an adapter on lm_head vLLM can only score "
            f"when it does nothing else; let them land or abort them first"
        )


def slowest(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the workers that a model is split over, the slowest one's seconds of each phase."""
    return {phase: max(seconds[phase] for seconds in ranks) for phase in ranks[0]}


def _lora(config: SamplerConfig) -> dict[str, Any]:
    if config.install == "merged":
        return {}
    rank = next((rank for rank in LORA_SLOTS if rank >= config.lora_rank), None)
    if config.lora_rank < 1 or rank is None:
        raise ValueError(f"an adapter of rank {config.lora_rank}: vLLM's slots take 1 to {LORA_SLOTS[-1]}")
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
