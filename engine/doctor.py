"""`rlvr doctor --cuda`: what a GPU does differently from a CPU, tried in two minutes on a tiny random model.

One sampler, one trainer. Every kernel against its reference; of both ways to install, three syncs and one in the middle
of a generation, each proved by log-probs.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.recipe import Dtype, Lora
from engine.rollout import Child, Sampler, SamplerError
from engine.rollout.messages import Group, SamplerConfig, Sampling
from engine.sync import SharedTensors
from engine.train.policy import Policy
from engine.types import Completion
from kernels.attention import segment_attention
from kernels.dispatch import choose
from kernels.layout import Layout
from kernels.lm_head import token_logprobs
from kernels.lora import lora_linears

INSTALLS: tuple[Literal["merged", "adapter"], ...] = ("merged", "adapter")
SYNCS = 3
VOCABULARY = 1000
HOW = Lora(rank=8, alpha=16.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
TEXT = tuple(7 * i % VOCABULARY for i in range(1, 100))
TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.05}
"""Mean difference of a token's log-prob between sampler and trainer, in nats."""
MOVES = 5.0
"""The random factors change a log-prob by so many times the tolerance or more, or nothing is proved."""
KERNEL_TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.03}
"""Of an output or a gradient, distance from the fp64 reference over its norm."""
LOG = 4000
"""Characters of the sampler's log that are shown where it fails; the log itself goes with its folder."""
TOKENS, SHORT = 200, 20
"""Of the completions that an install meets in the middle, and of the one that says that they are there."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str
    seconds: float

    def line(self) -> str:
        """As it stands in the table."""
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name:32}{1000 * self.seconds:10.1f} ms  {self.detail}"


def examine(sampler: str, trainer: str, dtype: Dtype) -> Iterator[Row]:
    """Every row, each as soon as it is known. A part that raises is a row that says so."""
    folder = Path(tempfile.mkdtemp(prefix="rlvr-doctor-"))
    try:
        parts = {"kernels": _kernels(trainer)} | {how: _syncs(folder, how, sampler, trainer, dtype) for how in INSTALLS}
        for name, rows in parts.items():
            try:
                yield from rows
            except Exception as error:  # of whatever kind, it is what this machine answers to that part
                yield Row(name, False, f"{type(error).__name__}: {error}", 0.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kernels(device: str) -> Iterator[Row]:
    kind = torch.device(device).type
    dtypes: tuple[tuple[Dtype, torch.dtype], ...] = (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    tried: dict[str, Callable[[str, torch.dtype, str], list[torch.Tensor]]] = {
        "lm_head": _lm_head,
        "attention": _attention,
        "lora": _lora,
    }
    for op, run in tried.items():
        for name, dtype in dtypes:
            chosen = choose(op, device=kind, dtype=dtype, facts={"head_dim": 64, "rank": 8})
            for impl in dict.fromkeys([chosen, "triton"] if kind == "cuda" else [chosen]):
                run(impl, dtype, device)  # builds it
                start = time.perf_counter()
                got = run(impl, dtype, device)
                if kind == "cuda":
                    torch.cuda.synchronize(device)
                seconds = time.perf_counter() - start
                want = run("reference", torch.float64, device)
                errors = [
                    float((g.double() - w).norm() / w.norm().clamp_min(1e-12)) for g, w in zip(got, want, strict=True)
                ]
                ok = all(error < KERNEL_TOLERANCE[name] for error in errors)  # NaN is not
                detail = f"{impl}; {max(errors):.1e} from the reference, gradients too"
                yield Row(f"{op} {name}", ok, detail, seconds)


def _normal(shape: Sequence[int], seed: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that bf16 holds exactly, so that every dtype computes from the same ones."""
    values = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().to(device, dtype).requires_grad_()


def _lm_head(impl: str, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    hidden, weight = _normal((300, 128), 1, dtype, device), _normal((VOCABULARY, 128), 2, dtype, device, 0.1)
    targets = torch.arange(300, device=device) % VOCABULARY
    logprobs, entropy = token_logprobs(hidden, weight, targets, impl=impl)
    return [logprobs.detach(), *torch.autograd.grad(logprobs.mean() - 0.1 * entropy.mean(), [hidden, weight])]


def _attention(impl: str, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    layout = Layout.from_lengths([70, 40, 30, 25], [-1, 0, 0, -1])  # a prompt with two completions, and one alone
    q = _normal((layout.n_tokens, 4, 64), 3, dtype, device)
    k, v = (_normal((layout.n_tokens, 2, 64), seed, dtype, device) for seed in (4, 5))
    out = segment_attention(q, k, v, layout, impl=impl)
    upstream = _normal(out.shape, 6, dtype, device).detach()
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], upstream)]


def _lora(impl: str, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    x = _normal((200, 128), 7, dtype, device)
    weights = [_normal((rows, 128), rows, dtype, device, 0.1).detach() for rows in (128, 64)]
    factors = [
        (_normal((8, 128), 8, wide, device, 0.1), _normal((rows, 8), 9, wide, device, 0.1)) for rows in (128, 64)
    ]
    outs = lora_linears(x, weights, factors, 0.5, impl=impl)
    upstream = [_normal(y.shape, 10, dtype, device).detach() for y in outs]
    leaves = [x, *(t for pair in factors for t in pair)]
    return [*(y.detach() for y in outs), *torch.autograd.grad(outs, leaves, upstream)]


def _syncs(folder: Path, how: Literal["merged", "adapter"], sampler: str, trainer: str, dtype: Dtype) -> Iterator[Row]:
    model = folder / "model"
    if not model.exists():
        _make_model(model)
    with ExitStack() as stack:
        start = time.perf_counter()
        config = _config(model, how, sampler, dtype)
        vllm = stack.enter_context(closing(Sampler(config, Child(config.device, threads=1, log=folder / f"{how}.log"))))
        policy = Policy(model, dtype=dtype, device=trainer, how=HOW, seed=0)
        tensors = policy.trained.tensors()
        sent = stack.enter_context(
            closing(SharedTensors({n: tuple(t.shape for t in group) for n, group in tensors.items()}, HOW.scale))
        )
        try:
            ready = vllm.wait_ready()
            names = vllm.bind(sent.address)
            seconds = time.perf_counter() - start
            yield Row(f"{how}: start", True, f"vLLM {ready.vllm_version} on {sampler}, {names} layers bound", seconds)
            before = policy.score(TEXT)
            yield _compared(f"{how}: before any sync", before, vllm.score(TEXT), None, dtype, 0.0, "")
            for version in range(1, SYNCS + 1):
                phases, took = _sync(policy, vllm, sent, version)
                now = policy.score(TEXT)
                yield _compared(f"{how}: sync {version}", now, vllm.score(TEXT), before, dtype, took, phases)
                before = now
            yield _in_the_middle(f"{how}: in the middle", policy, vllm, sent, dtype)
        except SamplerError as error:
            raise SamplerError(f"{error}\n{(folder / f'{how}.log').read_text(errors='replace')[-LOG:]}") from error


def _make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.06,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def _config(model: Path, how: Literal["merged", "adapter"], device: str, dtype: Dtype) -> SamplerConfig:
    """As a run on a GPU has it: the asynchronous engine, CUDA graphs, chunked prefill."""
    return SamplerConfig(
        model_dir=str(model),
        dtype=dtype,
        device=device,
        max_model_len=512,
        max_sequences=16,
        kv_cache_mb=64,
        gpu_memory_fraction=0.3,
        seed=0,
        install=how,
        lora_rank=HOW.rank if how == "adapter" else 0,
        lora_targets=HOW.targets if how == "adapter" else (),
        tokenizer=False,
        engine="async",
    )


@torch.no_grad()
def _set(policy: Policy, version: int) -> None:
    """The factors of a version, random ones."""
    generator = torch.Generator().manual_seed(version)
    for pair in policy.adapter.factors().values():
        for factor in pair:
            factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))


def _sync(policy: Policy, vllm: Sampler, sent: SharedTensors, version: int) -> tuple[str, float]:
    """New factors, installed; the milliseconds by phase as text, and the seconds in all."""
    _set(policy, version)
    start = time.perf_counter()
    sent.write(policy.trained.tensors())
    phases = {"send": time.perf_counter() - start} | vllm.install(version)
    took = time.perf_counter() - start
    return ", ".join(f"{phase} {1000 * seconds:.1f}" for phase, seconds in phases.items()), took


def _compared(
    name: str,
    trainer: Sequence[float],
    sampler: Sequence[float],
    before: Sequence[float] | None,
    dtype: Dtype,
    seconds: float,
    phases: str,
) -> Row:
    gap = _mean_difference(trainer, sampler)
    detail = f"sampler and trainer differ by {gap:.1e} nats"
    if before is None:
        return Row(name, gap < TOLERANCE[dtype], detail, seconds)
    moved = _mean_difference(trainer, before)
    ok = gap < TOLERANCE[dtype] and moved > MOVES * TOLERANCE[dtype]
    return Row(name, ok, f"{detail}, the sync moved them by {moved:.1e}; {phases}", seconds)


def _in_the_middle(name: str, policy: Policy, vllm: Sampler, sent: SharedTensors, dtype: Dtype) -> Row:
    """An install while completions are sampled: each token's log-prob is that of the version that labels it.

    The short completion, which lands first, says that the others are under way.
    """
    long = Group(0, "long", TEXT[:40], (1, 2, 3, 4), Sampling(TOKENS))
    vllm.submit([long, replace(long, group=1, seeds=(5,), sampling=Sampling(SHORT))])
    landed = list(vllm.landed(1))
    phases, took = _sync(policy, vllm, sent, SYNCS + 1)
    landed += vllm.landed(len(long.seeds))
    gaps = {}
    for version in (SYNCS, SYNCS + 1):
        _set(policy, version)
        gaps[version] = [gap for completion in landed for gap in _gaps(policy, completion, version)]
    ok = all(gaps.values()) and all(sum(of) / len(of) < TOLERANCE[dtype] for of in gaps.values())
    told = ", ".join(
        f"{len(of)} tokens of version {version} differ by {sum(of) / max(1, len(of)):.1e} nats"
        for version, of in gaps.items()
    )
    return Row(name, ok, f"{told}; {phases}", took)


def _gaps(policy: Policy, completion: Completion, version: int) -> list[float]:
    """Of the completion's tokens of a version: the sampler's log-prob against the policy's."""
    theirs = policy.score((*completion.prompt_ids, *completion.token_ids))[len(completion.prompt_ids) - 1 :]
    return [abs(theirs[i] - completion.logprobs[i]) for i, of in enumerate(completion.versions) if of == version]


def _mean_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
