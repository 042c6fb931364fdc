"""What trainer and sampler say to each other over their pipe; plain frozen dataclasses, pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.types import Completion


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """Everything that a sampler process needs to load its model; never changes while it lives."""

    model_dir: str
    dtype: Literal["float32", "bfloat16"]
    device: str
    max_model_len: int
    max_sequences: int
    kv_cache_mb: int
    gpu_memory_fraction: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a group's completions are drawn."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """One completion of `prompt_ids` for each seed."""

    group: int
    task_id: str
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Submit:
    """Sample these groups. They enter together, so that what is batched with what does not depend on the clock."""

    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Ask for the log-prob of every token of `token_ids` but the first, at temperature 1."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bind:
    """Where the factors will stand from now on: a description that `engine.sync` made."""

    address: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Install:
    """Take over the factors that stand in the shared memory now, as policy `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    vllm_version: str
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Landed:
    """A completion is finished."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class Scored:
    """The answer to `Score`."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """The answer to `Bind`: every factor has its place in vLLM's model."""

    modules: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The answer to `Install`."""

    version: int
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """The sampler can't go on; it exits after this."""

    reason: str
    traceback: str
