"""Phase times from the vendors' data sheets: limits, times a stated share of them that a run is assumed to reach.

Nothing here was measured on a GPU. `engine.plan.measure` takes the place of all of it for a machine that has run.
"""

from __future__ import annotations

import difflib
import math
import random
from dataclasses import dataclass

from engine.errors import InputError
from engine.plan.model import ModelSize
from engine.plan.simulate import Phases, Setup
from engine.recipe import Recipe
from engine.types import GPU_SEQUENCES


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet's limits."""

    name: str
    bf16_tflops: float
    """Dense, without sparsity."""
    fp32_tflops: float
    """Without tensor cores."""
    hbm_gb_per_second: float
    memory_gb: float
    nvlink_gb_per_second: float
    """Both directions together."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 989.4, 67.0, 3350.0, 80.0, 900.0),  # NVIDIA H100 SXM5
        Gpu("h200", 989.4, 67.0, 4800.0, 141.0, 900.0),  # NVIDIA H200 SXM
        Gpu("a100", 312.0, 19.5, 2039.0, 80.0, 600.0),  # NVIDIA A100 SXM 80 GB
    )
}

DECODE_BANDWIDTH_USE = 0.6
"""Of HBM's bandwidth while decoding: weights and KV are read in many small kernels, an adapter's among them."""
STEP_SECONDS = 0.002
"""Of an engine step beside the device's work: scheduling, sampling and log-probs, and the adapter's launches."""
SEQUENCE_SECONDS = 0.00002
"""Of the host for each sequence of an engine step: its token, its log-prob, its place in the schedule."""
PREFILL_MFU = 0.4
"""Of the dense peak while prompts are read: products as large as a trainer's, without a backward."""
TRAIN_MFU = 0.3
"""Of the dense peak while training. Large dense pre-training reaches 0.4 to 0.5; micro-batches of some thousand tokens,
an adapter's narrow products and attention, which the operations below leave out, cost the rest."""
TRAIN_STEP_SECONDS = 0.1
"""Of a step beside its tokens: packing, clipping, AdamW on an adapter, statistics."""
NVLINK_USE = 0.4
"""Of NVLink's figure, which counts both directions: a ring's all-reduce sends and receives at once."""
GPUS_A_HOST = 8
NETWORK_GB_PER_SECOND = 25.0
"""Of a host: half of 400 Gbit/s, which is what one adapter of that speed leaves after protocol and copies."""
PCIE_GB_PER_SECOND = 20.0
"""From a host's memory to its GPU: some two thirds of PCIe 4.0 x16, less than half of 5.0's."""
SYNC_SECONDS = 0.3
"""Of a version beside its bytes: the samplers stop, drop their KV and score a canary, as the trainer does."""
LANDING_SECONDS, LANDING_TOKEN_SECONDS = 0.0005, 0.36e-6
"""Of the driver for a completion that lands: wake-ups and a task of the grader, then unpickling and checking a token.
Assumed, as the next; of the order of what a core took once for completions of 4,096 tokens, and no script prints it."""
RECORD_TOKEN_SECONDS = 0.94e-6
"""Of the driver for a token's place in rollouts/ (JSON, gzip) and in the metrics, after each step."""
GRADE_SECONDS = 0.5
"""Of a program: a jail, an interpreter and ten cases of some tens of milliseconds. A set with heavy tests takes many
times as long, up to `sandbox.program_cpu_seconds`."""
CORES_A_GPU = 12
"""That grade, where the recipe names no number: a host with 8 GPUs has some 100 to 200 cores, and its samplers and
trainers need a few for each."""
MEAN_SHARE, SIGMA = 0.4, 0.6
"""Of `rollout.max_tokens`, the mean length of a completion, and the spread of its logarithm."""
PROMPT_TOKENS = 400
"""Of a prompt, unless `rollout.max_prompt_tokens` is less: a problem's statement with examples."""
KNOWN_GROUPS = 256
"""Whose lengths are drawn."""


def gpu_named(name: str) -> Gpu:
    """The data sheet by its name. Raises InputError for one that is not there, with the nearest."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(f"--gpu {name}: no data sheet of it is here, only of {', '.join(GPUS)}{hint}")


def drawn_lengths(mean: float, longest: int, group_size: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Tokens of the completions of KNOWN_GROUPS groups: lognormal, cut off at `longest`, with this mean after the cut.

    Raises InputError for a mean that such lengths can't have.
    """
    if not 1 <= mean < longest:
        raise InputError(f"--mean-tokens {mean:g}: with rollout.max_tokens = {longest} it must be from 1 to below that")
    low, high = -20.0, math.log(longest) + 20
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle, SIGMA, longest) < mean else (low, middle)
    draw = random.Random(seed)
    return tuple(
        tuple(max(1, round(min(longest, draw.lognormvariate(low, SIGMA)))) for _ in range(group_size))
        for _ in range(KNOWN_GROUPS)
    )


def cut_mean(mu: float, sigma: float, longest: float) -> float:
    """E[min(X, longest)] of a lognormal X."""
    at = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _normal(at - sigma) + longest * (1 - _normal(at))


def _normal(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def width(dtype: str) -> int:
    """Bytes of a number."""
    return 2 if dtype == "bfloat16" else 4


def room_for(recipe: Recipe, model: ModelSize, gpu: Gpu) -> float:
    """Tokens whose keys and values fit beside a sampler's weights. Raises InputError where the weights don't fit."""
    rollout = recipe.rollout
    given = gpu.memory_gb * 1e9 * rollout.gpu_memory_fraction * rollout.tensor_parallel
    weights = model.parameters * width(rollout.dtype)
    if weights >= given:
        raise InputError(
            f"the sampler's weights take {weights / 1e9:.0f} GB, and rollout.gpu_memory_fraction = "
            f"{rollout.gpu_memory_fraction} of {rollout.tensor_parallel} {gpu.name} is {given / 1e9:.0f} GB: raise "
            f"rollout.tensor_parallel"
        )
    return (given - weights) / (model.kv_numbers * width(rollout.dtype))


def sheet_phases(
    recipe: Recipe, model: ModelSize, gpu: Gpu, lengths: tuple[tuple[int, ...], ...], grade_seconds: float, setup: Setup
) -> Phases:
    """The phases of a setup on GPUs of a kind, by the shares above."""
    rollout, split = recipe.rollout, recipe.rollout.tensor_parallel
    mean = sum(map(sum, lengths)) / sum(map(len, lengths))
    prompt = min(PROMPT_TOKENS, rollout.max_prompt_tokens)
    context = prompt + mean / 2
    read = gpu.hbm_gb_per_second * 1e9 * DECODE_BANDWIDTH_USE * split
    product = 2 * model.active / (peak(gpu, rollout.dtype) * split)
    kv = model.kv_numbers * width(rollout.dtype) * context / read
    exchanged = exchange_seconds(model.trained * 4, gpu, setup.trainers)
    return Phases(
        decode_seconds=model.read * width(rollout.dtype) / read + STEP_SECONDS,
        decode_sequence_seconds=kv + product / PREFILL_MFU + SEQUENCE_SECONDS,
        lengths=lengths,
        grade_seconds=grade_seconds,
        train_token_seconds=operations(recipe) * model.active / (peak(gpu, recipe.model.dtype) * TRAIN_MFU),
        train_step_seconds=TRAIN_STEP_SECONDS * recipe.optim.updates,
        exchange_seconds=exchanged * recipe.optim.updates,
        sync_seconds=sync_seconds(recipe, model, hosts(setup, split)),
        max_sequences=max(1, min(GPU_SEQUENCES, int(room_for(recipe, model, gpu) / (prompt + mean)))),
        prompt_tokens=prompt,
        prefill_token_seconds=product / PREFILL_MFU,
        landing_seconds=LANDING_SECONDS + mean * LANDING_TOKEN_SECONDS,
        record_seconds=mean * RECORD_TOKEN_SECONDS,
    )


def operations(recipe: Recipe) -> int:
    """Floating-point operations a weight and trained token.

    Two each for the forward and for the gradient with respect to the input, two for the weight's own where it is
    trained, two for a forward that is computed again, for the KL's reference, and for the old log-probs of several
    updates.
    """
    again = (recipe.full is not None, recipe.train.checkpointing, recipe.loss.kl > 0, recipe.optim.updates > 1)
    return 4 + 2 * sum(again)


def exchange_seconds(gradient_bytes: float, gpu: Gpu, trainers: int) -> float:
    """Of a ring's all-reduce of fp32 gradients: over NVLink inside a host, else over the network of the hosts."""
    if trainers > GPUS_A_HOST:
        return network_seconds(gradient_bytes, trainers)
    return 2 * (trainers - 1) / trainers * gradient_bytes / (gpu.nvlink_gb_per_second * NVLINK_USE * 1e9)


def network_seconds(gradient_bytes: float, trainers: int) -> float:
    """Of a ring's all-reduce between hosts."""
    return 2 * (trainers - 1) / trainers * gradient_bytes / (NETWORK_GB_PER_SECOND * 1e9)


def hosts(setup: Setup, tensor_parallel: int) -> int:
    """Of GPUS_A_HOST devices each."""
    return -(-(setup.samplers * tensor_parallel + setup.trainers) // GPUS_A_HOST)


def sync_seconds(recipe: Recipe, model: ModelSize, machines: int) -> float:
    """Of a version: its bytes from the driver to each other host, one after the other, and into the GPUs of each.

    `merged` also writes every weight again from its pristine copy in the host's memory.
    """
    sent = model.trained * (4 if recipe.lora else width(recipe.model.dtype))
    written = sent + (model.parameters * width(recipe.rollout.dtype) if recipe.sync.install == "merged" else 0)
    network = sent * (machines - 1) / (NETWORK_GB_PER_SECOND * 1e9)
    return SYNC_SECONDS + network + written / (PCIE_GB_PER_SECOND * 1e9)


def peak(gpu: Gpu, dtype: str) -> float:
    """The data sheet's operations a second."""
    return (gpu.bf16_tflops if dtype == "bfloat16" else gpu.fp32_tflops) * 1e12
