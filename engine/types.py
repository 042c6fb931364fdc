"""What flows between the rooms of the trainer, all of it on one page.

Plain frozen dataclasses: tasks makes `Task`, rollout `Prompt` and `Completion`, reward `Graded`, train `Batch` and
`StepStats`, evaluate `Answer`, `SuiteResult` and `Gain`.
`Verdict` and the test types are the sandbox's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from sandbox import Limits, Tests, Verdict

if TYPE_CHECKING:  # the torch-free commands load this page too
    import torch

    from kernels.layout import Layout

Message = Mapping[str, str]
"""One chat message: role and content."""

LORA_SLOTS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes LoRA slots of, its --max-lora-rank; an adapter takes the next one that is large enough."""

CPU_SEQUENCES, GPU_SEQUENCES = 64, 256
"""Completions that a sampler decodes at once; on a CPU more only queue."""

Factors = Mapping[str, "tuple[torch.Tensor, torch.Tensor]"]
"""LoRA factors by module name, as transformers spells it: A `[rank, in]` and B `[out, rank]`, both fp32."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: what the model reads and how its program is judged."""

    id: str
    prompt: str | tuple[Message, ...]
    """Raw text, or chat messages for the model's template."""
    tests: Tests
    starter: str = ""
    """The program's beginning that stands at the prompt's end: the completion goes on from it. Empty when the answer
    holds a whole program in a code block."""
    reference: str | None = None
    """A program that passes, where the source has one."""
    source: str = ""
    limits: Limits | None = None
    """The task's own limits; None takes the recipe's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads of a task."""

    ids: tuple[int, ...]
    opening: str = ""
    """The beginning of the answer that stands at the prompt's end, such as `<think>` or a prefill. It is graded with
    what is sampled."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, exactly as it was sampled."""

    task_id: str
    group: int
    """Given by the scheduler when the group is submitted; never recovered from text."""
    member: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The sampler's log-probs of `token_ids`, after the temperature, in nats."""
    finish: str
    """`stop` (end token or stop string), `length`."""
    version: int
    """Policy version that sampled the first token."""
    text: str
    """For the grader alone: decoded, without the stop string."""
    boundaries: tuple[tuple[int, int], ...] = ()
    """(token index, version) wherever a newer version took over in the middle."""

    @property
    def truncated(self) -> bool:
        """It ran into max_tokens."""
        return self.finish == "length"

    @property
    def versions(self) -> list[int]:
        """The policy version that sampled each token."""
        starts = [(0, self.version), *self.boundaries, (len(self.token_ids), 0)]
        return [version for (at, version), (end, _) in pairwise(starts) for _ in range(at, end)]


@dataclass(frozen=True, slots=True)
class Graded:
    """A completion with what the jail said and what that is worth."""

    completion: Completion
    program: str | None
    verdict: Verdict
    reward: float | None
    """None is INFRA: not a reward, in no statistic, trained on by nothing."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's named parts, before their weights."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Everything that was sampled for a step, group by group, and which groups are trained."""

    groups: Sequence[Sequence[Graded]]
    advantages: Sequence[Sequence[float]]
    trained: Sequence[int]
    """Positions of the groups that make up the batch."""
    rounds: int
    """How many times prompts were sampled: more than once where groups without a signal were replaced."""
    version: int
    """Policy version that is trained on them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: token arrays packed flat behind each other, shared prompts standing once.

    Rows are the trainable tokens: `N` of them, each predicted by the hidden state at `predictors`.
    """

    input_ids: torch.Tensor
    """int64 `[tokens]`"""
    layout: Layout
    predictors: torch.Tensor
    """int64 `[N]`: index into the token axis whose hidden state predicts the row's token."""
    targets: torch.Tensor
    """int64 `[N]`: the sampled ids."""
    sampled_logprobs: torch.Tensor
    """fp32 `[N]`"""
    advantages: torch.Tensor
    """fp32 `[N]`"""
    sequences: torch.Tensor
    """int64 `[N]`: which of the step's trained completions the row belongs to."""
    versions: torch.Tensor
    """int64 `[N]`: the policy version that sampled the row's token."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Everything that the metrics show of one optimizer step."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    kl: float
    """k3 estimate of the KL to the base; 0 where the recipe has no KL term."""
    clip_low_share: float
    clip_high_share: float
    mismatch_mean: float
    """Mean |trainer - sampler| log-prob, in nats. This and the next two are of the trained tokens that the very version
    which is trained has sampled, so that a lag's own difference is no part of them; 0 where there are none."""
    mismatch_max: float
    gen_kl: float
    """Mean of exp(d) - 1 - d, d = trainer - sampler: the k3 estimate of KL(sampler || trainer)."""
    mismatch_tokens: int
    """How many tokens these three are of."""
    ratio_min: float
    """Trainer / sampler, this and the next: the extremes of all trained tokens, older versions' too."""
    ratio_max: float
    trained_tokens: int
    forward_tokens: int
    micro_batches: int
    skipped: bool
    """Nothing was changed: no group had a signal, or no update's gradient was finite."""
    non_finite: int
    """Updates whose gradient was no number; they changed nothing."""
    memory_predicted_mb: float
    """What weights and step were to take on the trainer's device, MiB; 0 where `Trainer.require_room` did not look."""
    memory_peak_mb: float
    """What they took at their height: tensors on CUDA, on a CPU the process's growth since before the weights."""
    gaps: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """The tokens that trainer and sampler disagree about most, trainer - sampler in nats by token index, of each
    completion that has any; by the completion's number among those of the trained groups."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an evaluation keeps of one sampled and judged answer."""

    task_id: str
    sample: int
    """Its number among the answers to the task, from 0."""
    verdict: str
    passed: int
    """Cases."""
    total: int
    finish: str
    tokens: int
    detail: str
    text: str


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """pass@1 over `samples` answers of each problem."""

    name: str
    pass_rate: float
    by_problem: Mapping[str, float]
    by_source: Mapping[str, float]
    truncated_share: float
    answers: int
    infra: int
    """Answers that could not be judged; they count in no rate."""
    pass_at: Mapping[str, float]
    """pass@k without bias, by its name, for as many k as every problem has answers."""
    finished_pass_rate: float
    """Of the answers that did not run into max_tokens."""
    mean_tokens: float
    verdicts: Mapping[str, int]
    """Answers by verdict: NO_CODE is a failed extraction, CE no Python, TLE a time-out."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Mean difference of two pass rates over the same problems, with its 95 % percentile interval."""

    mean: float
    low: float
    high: float
