"""How much memory an optimizer step takes, known before it runs.

A layer is run forward and backward while every allocation is noted: on a CPU with fake tensors, which have shapes
and no memory. What it keeps and what it needs for a moment grow with the tokens alone, so two sizes give the lines
that hold for any micro-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import RunError
from engine.recipe import Full, Lora, Recipe
from engine.train.policy import ATTENTION, DTYPES, Policy
from engine.types import Batch
from kernels.attention import register_attention
from kernels.layout import Layout
from kernels.lm_head import workspace_bytes

CLEAR_REFS, STATUS, MEMINFO = Path("/proc/self/clear_refs"), Path("/proc/self/status"), Path("/proc/meminfo")
MIN_BUDGET = 64
"""The smallest `train.token_budget` that a recipe takes."""
PROBES = (256, 1024)
"""Tokens of the passes that are measured."""


@dataclass(frozen=True, slots=True)
class Line:
    """fixed + slope * tokens, in bytes."""

    fixed: float
    slope: float

    def at(self, tokens: int) -> float:
        """Its value."""
        return self.fixed + self.slope * tokens


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that training takes: what stands, and what a micro-batch adds at its height."""

    weights: int
    """The model's and the adapter's, and fp32 masters beside narrower weights."""
    gradients: int
    """fp32, from the first backward on."""
    moments: int
    """AdamW's two, fp32, from the first step on."""
    kept: Line
    """What the forward keeps for the backward."""
    moment: Line
    """What the backward of a layer needs beside that for as long as it runs."""
    row: int
    """States and their gradients of one trained token."""
    head: torch.Tensor
    """The output projection's weight, `[vocab, hidden]`."""

    def peak(self, batches: Sequence[Batch]) -> int:
        """The height of a step that trains these micro-batches one after the other."""
        sizes = [(batch.input_ids.numel(), batch.targets.numel()) for batch in batches]
        return max(self.peak_of(*size, first=i == 0) for i, size in enumerate(sizes))

    def peak_of(self, tokens: int, rows: int, *, first: bool = False) -> int:
        """The height of a micro-batch of this many forward tokens and trained ones; the first finds no gradients."""
        kept, moment = self.kept.at(tokens), self.moment.at(tokens)
        head = kept + self.row * rows + workspace_bytes(rows, self.head)
        # A first backward makes its gradients while it gives back what was kept for them.
        layers = max(kept, self.gradients) + moment if first else self.gradients + kept + moment
        return int(self.weights + self.moments + max(layers, head if first else head + self.gradients))

    def fitting_tokens(self, free: int) -> int:
        """The largest `train.token_budget` whose step needs no more than `free` bytes; 0 if none does."""
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak_of(middle, middle) <= free else (low, middle - 1)
        return low


def measure(policy: Policy) -> StepMemory:
    """What a step of this policy takes. Allocates nothing of its size."""
    kept, moment = zip(*(_layers(policy, tokens) for tokens in PROBES), strict=True)
    masters = policy.trained.parameters
    standing = {t.untyped_storage()._cdata: t for t in [*policy.model.parameters(), *policy.model.buffers(), *masters]}
    states = 2 * policy.head.shape[1] * policy.head.element_size()
    return StepMemory(
        weights=sum(t.untyped_storage().nbytes() for t in standing.values()),
        gradients=4 * sum(p.numel() for p in masters),
        moments=8 * sum(p.numel() for p in masters),
        kept=_line(*kept),
        moment=_line(*moment),
        row=states + 16 * 4,  # what the loss knows of a row: ids, log-probs, weights
        head=policy.head,
    )


def planned(model_dir: Path, *, dtype: str, how: Lora | Full, checkpointing: bool) -> StepMemory:
    """What a step of the model in a folder would take, from its configuration alone: no weight is loaded or made.

    The layers are those of a CPU's kernels. Raises what `Policy` raises.
    """
    register_attention(ATTENTION)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_dir, local_files_only=True),
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
        )
        return measure(Policy(model, dtype=dtype, device="cpu", how=how, seed=0, checkpointing=checkpointing))


def _line(a: int, b: int) -> Line:
    slope = (b - a) / (PROBES[1] - PROBES[0])
    return Line(a - slope * PROBES[0], slope)


def _layers(policy: Policy, tokens: int) -> tuple[int, int]:
    """Bytes that the whole model keeps, and the most that the backward of one of its layers adds for a moment.

    Layers of one kind keep the same, so each kind is run once alone and once doubled: what is run costs time.
    """
    decoder = policy.model.model
    kinds: dict[str, list[nn.Module]] = {}
    for layer in decoder.layers:
        kinds.setdefault(_kind(layer), []).append(layer)
    kept, around, moment = 0, 0, 0
    whole = decoder.layers
    try:
        for layers in kinds.values():
            decoder.layers = nn.ModuleList(layers[:1])
            one, high = _pass(policy, tokens)
            decoder.layers = nn.ModuleList([layers[0], layers[0]])
            own = _pass(policy, tokens)[0] - one
            kept, around, moment = kept + own * len(layers), one - own, max(moment, high - one)
    finally:
        decoder.layers = whole
    return kept + around, moment


def _kind(layer: nn.Module) -> str:
    """What must be equal for two layers to keep the same: the names, shapes and dtypes of their parameters."""
    return str([(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()])


def _pass(policy: Policy, tokens: int) -> tuple[int, int]:
    """Bytes kept at the end of the forward, and the most there are until the backward's end, gradients left out."""
    layout = Layout((0, tokens), (-1,))
    layout.positions()  # cached for this layout: made before anything is fake
    ids = torch.zeros(tokens, dtype=torch.int64, device=policy.device)
    standing = [*policy.model.parameters(), *policy.model.buffers(), ids]
    # CUDA kernels cannot be launched on fake tensors; there two layers of this many tokens are nothing.
    real = policy.device.type != "cpu" or isinstance(policy.head, FakeTensor)
    mode = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Allocations(standing) as allocations:
        state = policy.hidden(ids, layout)
        kept = allocations.live()
        inputs = [p for p in policy.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(state, inputs, torch.ones_like(state), allow_unused=True)
        return kept, allocations.peak(without=[g for g in found if g is not None])


class Allocations(TorchDispatchMode):
    """Notes every tensor memory that is made and freed inside the context, in order."""

    def __init__(self, standing: Sequence[torch.Tensor]) -> None:
        """standing: tensors that were there before; they and their views are not counted."""
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in standing}
        self._events: list[tuple[int, int]] = []  # number of the memory, bytes gained or lost
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        number, size = len(self._events), storage.nbytes()
        self._known.add(key)
        self._numbers[key] = number
        self._events.append((number, size))
        weakref.finalize(storage, self._freed, key, number, size)

    def _freed(self, key: int, number: int, size: int) -> None:
        self._known.discard(key)
        self._events.append((number, -size))

    def live(self) -> int:
        """Bytes that are there now."""
        return sum(size for _, size in self._events)

    def peak(self, without: Sequence[torch.Tensor] = ()) -> int:
        """The most bytes that were there at once, some tensors' own left out."""
        out = {self._numbers.get(t.untyped_storage()._cdata) for t in without}
        return max(accumulate(size for number, size in self._events if number not in out), default=0)


def require_room(memory: StepMemory, token_budget: int, device: torch.device) -> None:
    """Raise RunError where a full micro-batch will not fit beside the weights that are loaded, naming what would."""
    free = _free(device)
    need = memory.peak_of(token_budget, token_budget) - memory.weights
    if need <= free:
        return
    fits = memory.fitting_tokens(free + memory.weights)
    hint = f"lower it to {fits}" if fits >= MIN_BUDGET else "no budget fits"
    raise RunError(
        f"train.token_budget = {token_budget} needs {need / 2**30:.1f} GiB on {device} beside the weights, "
        f"{free / 2**30:.1f} GiB are free: {hint}, or set train.checkpointing = true"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not get memory: CUDA has a class for it, a CPU's allocator only words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(said: str, tokens: int, recipe: Recipe, memory: StepMemory | None, device: torch.device) -> RunError:
    """The error of a step that ran out of memory at micro-batches of up to `tokens` tokens: what to lower, to what."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    budget = recipe.train.token_budget
    hints = [] if recipe.train.checkpointing else ["set train.checkpointing = true"]
    if tokens > budget:
        longest = recipe.rollout.max_tokens
        hints.insert(0, f"one completion with its prompt takes {tokens}: lower rollout.max_tokens = {longest}")
    else:
        # Half of it where the prediction saw room: it was wrong, or somebody else took the memory.
        fits = memory.fitting_tokens(_free(device) + memory.weights + memory.moments) if memory else budget
        lower = min(fits, budget // 2)
        hints.insert(0, f"lower it to {lower}" if lower >= MIN_BUDGET else "no smaller budget will do")
    return RunError(
        f"the trainer ran out of memory on {device} in a micro-batch of up to {tokens} tokens, "
        f"train.token_budget = {budget}: {', or '.join(hints)}; then go on with --resume and --allow-change ({said})"
    )


def _free(device: torch.device) -> int:
    """Bytes that nobody uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


class Gauge:
    """The height of a device's memory in use: on CUDA of all tensors, on a CPU of the process beyond what it was."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU, what the process holds now is not counted."""
        self._device = device
        self._start = _resident("VmRSS") if device.type == "cpu" else 0

    def clear(self) -> None:
        """Forget the height so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            CLEAR_REFS.write_text("5")

    def height_mb(self) -> float:
        """MiB at the height since `clear`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return (_resident("VmHWM") - self._start) / 2**20


def _resident(field: str) -> int:
    """A size of this process in bytes, as the kernel tells it."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
