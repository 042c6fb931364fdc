"""The one rule that says which implementation runs: a pure function, said once in the log, with one override.

| operation | `reference` | `cpu` | `triton` | `flash` |
|---|---|---|---|---|
| `lm_head` | plain PyTorch, any device | CPU | CUDA | - |
| `attention` | plain PyTorch, any device | CPU | CUDA | CUDA, torch's own FlashAttention-2 |
| `lora` | plain PyTorch, any device | CPU | CUDA | - |

Left alone, float64 goes to `reference` (it is the oracle), a CPU to `cpu` and CUDA to `triton`, except that
bf16 and fp16 attention goes to `flash` (no Triton kernel here has been timed on a GPU yet).

The override is `impl=` of the call, or else the environment variable `RLVR_KERNELS`: a name for every
operation (`reference`) or a list by operation (`attention=reference,lm_head=cpu`).
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from functools import cache

import torch

log = logging.getLogger("rlvr.kernels")

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "lm_head": ("reference", "cpu", "triton"),
    "attention": ("reference", "cpu", "triton", "flash"),
    "lora": ("reference", "cpu", "triton"),
}
_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "reference": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
    "flash": (torch.bfloat16, torch.float16),
}
_TRITON_HEAD_DIMS = (16, 32, 64, 128)


class UnsupportedError(ValueError):
    """An implementation was asked for something it does not do; names the argument and the implementation."""


def choose(
    op: str,
    *,
    device: str,
    dtype: torch.dtype,
    facts: Mapping[str, int] | None = None,
    interpret: bool = False,
    override: str | None = None,
) -> str:
    """The implementation of `op` for these inputs: "reference", "cpu", "triton" or "flash".

    device: "cpu" or "cuda". facts: the shape facts an implementation may depend on (`head_dim`, `rank`).
    interpret: Triton runs in its interpreter, so its kernels accept CPU tensors.
    override: the name asked for, or None. Raises UnsupportedError if the implementation can't do it.
    """
    if op not in OPERATIONS:
        raise UnsupportedError(f"op={op!r}: the kernels are {', '.join(OPERATIONS)}")
    name = override if override is not None else _default(op, device, dtype, facts or {})
    if name not in OPERATIONS[op]:
        near = difflib.get_close_matches(name, OPERATIONS[op], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnsupportedError(f"impl={name!r}: {op} has {', '.join(OPERATIONS[op])}{hint}")
    _refuse(op, name, device, dtype, facts or {}, interpret)
    return name


def _default(op: str, device: str, dtype: torch.dtype, facts: Mapping[str, int]) -> str:
    if dtype == torch.float64:
        return "reference"
    if device == "cpu":
        return "cpu"
    if op == "attention" and dtype in _DTYPES["flash"] and _flash_head_dim(facts):
        return "flash"
    return "triton"


def _flash_head_dim(facts: Mapping[str, int]) -> bool:
    return facts.get("head_dim", 64) % 8 == 0 and facts.get("head_dim", 64) <= 256


def _refuse(op: str, name: str, device: str, dtype: torch.dtype, facts: Mapping[str, int], interpret: bool) -> None:
    devices = {"reference": (device,), "cpu": ("cpu",), "triton": ("cuda",), "flash": ("cuda",)}[name]
    if device not in devices and not (name == "triton" and device == "cpu" and interpret):
        raise UnsupportedError(f"device={device}: {op} impl={name!r} runs on {', '.join(devices)}")
    if dtype not in _DTYPES[name]:
        known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES[name])
        raise UnsupportedError(f"dtype={str(dtype).removeprefix('torch.')}: {op} impl={name!r} takes {known}")
    if op != "attention":
        return
    if name == "triton" and facts.get("head_dim", 64) not in _TRITON_HEAD_DIMS:
        raise UnsupportedError(f"head_dim={facts['head_dim']}: attention impl='triton' takes {_TRITON_HEAD_DIMS}")
    if name == "flash" and not _flash_head_dim(facts):
        raise UnsupportedError(f"head_dim={facts['head_dim']}: attention impl='flash' takes multiples of 8 up to 256")


def pick(op: str, tensor: torch.Tensor, impl: str | None, facts: Mapping[str, int] | None = None) -> str:
    """`choose` for this tensor's device and dtype, with `impl` or `RLVR_KERNELS` as the override; logged once."""
    override = impl if impl is not None else from_environment(op, os.environ.get("RLVR_KERNELS", ""))
    interpret = os.environ.get("TRITON_INTERPRET", "0") == "1"
    name = choose(
        op, device=tensor.device.type, dtype=tensor.dtype, facts=facts, interpret=interpret, override=override
    )
    why = "impl=" if impl is not None else "RLVR_KERNELS" if override is not None else "the default"
    _say_once(op, name, tensor.device.type, tensor.dtype, why)
    return name


def from_environment(op: str, value: str) -> str | None:
    """What `RLVR_KERNELS=value` asks for `op`, or None; raises UnsupportedError for an operation it misspells."""
    asked: str | None = None
    for item in filter(None, (part.strip() for part in value.split(","))):
        key, found, name = item.partition("=")
        if not found:
            asked = item
        elif key not in OPERATIONS:
            raise UnsupportedError(f"RLVR_KERNELS={value!r}: {key!r} is none of {', '.join(OPERATIONS)}")
        elif key == op:
            asked = name
    return asked


@cache
def _say_once(op: str, name: str, device: str, dtype: torch.dtype, why: str) -> None:
    log.info("%s on %s in %s: %s (%s)", op, device, str(dtype).removeprefix("torch."), name, why)


@cache
def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16 or AMX).

    Without it PyTorch's bf16 matrix product is many times slower than its fp32 one (measured on AVX2: 8
    against 75 GFLOP/s), so the `cpu` kernels widen cache-sized tiles to fp32 and multiply those.
    """
    amx = bool(torch.cpu._is_amx_tile_supported())
    return bool(torch.cpu._is_avx512_bf16_supported()) or amx


def cpu_compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the `cpu` kernels multiply inputs of this dtype."""
    if dtype == torch.float64:
        return torch.float64
    if dtype == torch.bfloat16 and cpu_has_fast_bf16():
        return torch.bfloat16
    return torch.float32
