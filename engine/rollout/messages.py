"""What trainer and sampler say to each other over their pipe; plain frozen dataclasses, pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.types import Completion


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """Everything that a sampler process needs to load its model; never changes while it lives."""

    model_dir: str
    dtype: Literal["float32", "bfloat16"]
    device: str
    """`cpu`, `cuda:0`, or `cuda:0,1` for a model that is split over two."""
    max_model_len: int
    max_sequences: int
    kv_cache_mb: int
    gpu_memory_fraction: float
    seed: int
    install: Literal["merged", "adapter"] = "merged"
    """How the trainer's tensors are written; `adapter` starts vLLM with its LoRA layers."""
    lora_rank: int = 0
    """The adapter's rank, for `adapter`."""
    lora_targets: tuple[str, ...] = ()
    """For `adapter`: the last parts of the trained layers' names; vLLM's other layers stay plain and fast."""
    tokenizer: bool = True
    """False for a model folder without one: completions have no text and can't stop at a string."""
    engine: Literal["step", "async"] = "step"
    """Whether vLLM's engine is driven step by step in the sampler's process, or runs in a process of its own."""
    tensor_parallel: int = 1
    """How many devices, or processes on a CPU, the model is split over."""


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
    members: tuple[int, ...] | None = None
    """Indices of the seeds that are to be sampled; None is all of them."""

    @property
    def asked(self) -> Sequence[int]:
        """The members that are to be sampled."""
        return range(len(self.seeds)) if self.members is None else self.members


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
    """Where the trainer's tensors stand from now on: a description that `engine.sync` made."""

    address: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Install:
    """Take over what the trainer has written or sends now, as policy `version`, groups in the middle or not."""

    version: int
    meeting: dict[str, Any] | None = None
    """Where to receive it, as `engine.sync` says; None for shared memory, where it stands already."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop what is left of these groups."""

    groups: tuple[int, ...]


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
class Beat:
    """The sampler's heartbeat: sent between two engine steps while it is sampling, once a second, and when it is done.

    It comes from the loop that drives vLLM, so that a vLLM that hangs has none.
    """

    submits: int
    """Submit messages that it has seen."""
    unfinished: int
    """Completions that are still to land."""
    tokens: int
    """Sampled since it started."""
    busy_seconds: float
    """Spent in vLLM's steps since it started."""
    memory_mb: float
    """Resident memory of its process."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The answer to `Score`."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """The answer to `Bind`: every tensor has its place in vLLM's model."""

    names: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The answer to `Install`."""

    version: int
    seconds: dict[str, float]
    missed: str = ""
    """Why the tensors did not arrive; the weights are then still the old ones."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The sampler can't go on; it exits after this, and its log has the traceback."""

    reason: str
    again: bool = False
    """Whether another process in its place may do better."""


class VllmLost(Exception):
    """vLLM's own process has ended, and its sampler with it: the trainer starts another one."""
