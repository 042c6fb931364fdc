"""Triton without a GPU: every kernel in the interpreter (a process of its own) and compiled for sm_90 (this one)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import attention_triton, lm_head_triton, lora_triton, triton_config
from tests.kernels.ahead_of_time import Build, build

pytestmark = pytest.mark.slow
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHARED_LIMIT = 227 * 1024


def test_every_kernel_in_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/kernels/interpreter"], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def check(made: Build, warps: int, *, tensor_core: bool) -> None:
    assert made.spills == 0, made
    assert made.stack == 0, made
    assert made.shared <= SHARED_LIMIT, made
    assert made.registers * warps * 32 <= 65536, made
    assert (made.tensor_core > 0) == tensor_core, made


def scalars(kernel: Any, pointers: dict[str, str], floats: tuple[str, ...], constants: dict[str, Any]) -> dict:
    """A signature: the pointers as given, the floats, everything else that is no constant an int32."""
    rest = [n for n in kernel.arg_names if n not in pointers and n not in constants]
    return pointers | {n: "fp32" if n in floats else "i32" for n in rest}


@functools.cache
def project(dtype: torch.dtype, mode: int, lora: bool, cap: bool, aligned: bool) -> tuple[Build, int]:
    size = triton_config.head_gradient(dtype, cap) if mode == 2 else triton_config.head(dtype)
    kernel, name = lm_head_triton._project, NAMES[dtype]
    constants = {
        "MODE": mode, "LORA": lora, "CAP": cap, "RANK": 16,
        "ROWS": size.rows, "COLUMNS": size.columns, "INNER": size.inner,
        "IEEE": dtype == torch.float32,
    }  # fmt: skip
    pointers = {n: "*fp32" for n in kernel.arg_names if n.endswith("_ptr")}
    pointers |= {"x_ptr": f"*{name}", "w_ptr": f"*{name}", "out_ptr": f"*{name}", "target_ptr": "*i64"}
    floats = ("divisor", "cap_over_temperature", "temperature_over_cap")
    signature = scalars(kernel, pointers, floats, constants)
    hints = (*pointers, "width", "stride_x", "stride_w", "stride_u", "stride_b", "stride_out") if aligned else ()
    return build(kernel, signature, constants, hints, size.warps, size.stages), size.warps


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize(("lora", "cap"), [(False, False), (True, False), (True, True)])
def test_head_product_compiles_for_sm_90(mode: int, lora: bool, cap: bool) -> None:
    made, warps = project(torch.bfloat16, mode, lora, cap, True)
    check(made, warps, tensor_core=True)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_head_product_in_fp32_compiles(mode: int) -> None:
    made, warps = project(torch.float32, mode, True, True, True)
    check(made, warps, tensor_core=False)


def test_unaligned_head_product_compiles_and_is_what_the_wrapper_avoids() -> None:
    """Without 16-byte rows there is no asynchronous pipeline: it must build, and `_aligned` keep us from it."""
    made, _ = project(torch.bfloat16, 1, False, False, False)
    assert made.tensor_core > 0
    assert made.shared < project(torch.bfloat16, 1, False, False, True)[0].shared
    odd = torch.zeros(5, 40, dtype=torch.bfloat16)[:, 3:30]
    for x in (odd, odd.contiguous(), torch.zeros(30, 5, dtype=torch.bfloat16).T):
        even = lm_head_triton._aligned(x)
        assert even.stride(1) == 1
        assert even.stride(0) * 2 % 16 == 0
        assert even.data_ptr() % 16 == 0
        assert torch.equal(even, x)


@pytest.mark.parametrize("cap", [False, True])
def test_stored_gradient_compiles(cap: bool) -> None:
    kernel = lm_head_triton._to_gradient
    constants = {"CAP": cap, "ROWS": 16, "COLUMNS": triton_config.head(torch.bfloat16).columns}
    pointers = {n: "*fp32" for n in kernel.arg_names if n.endswith("_ptr")}
    pointers |= {"e_ptr": "*bf16", "target_ptr": "*i64"}
    signature = scalars(kernel, pointers, ("temperature_over_cap",), constants)
    check(build(kernel, signature, constants, (*pointers, "stride_e"), 4, 3), 4, tensor_core=False)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lora_linear_compiles(dtype: torch.dtype, swapped: bool, add: bool) -> None:
    size, kernel, name = triton_config.linear(dtype), lora_triton._linear, NAMES[dtype]
    constants = {
        "SWAPPED": swapped, "LORA": True, "BIAS": not swapped, "ADD": add, "RANK": 16,
        "ROWS": size.rows, "COLUMNS": size.columns,
        "INNER": size.inner, "IEEE": dtype == torch.float32,
    }  # fmt: skip
    pointers = {n: f"*{name}" for n in kernel.arg_names if n.endswith("_ptr")} | {"before_ptr": "*fp32"}
    signature = scalars(kernel, pointers, (), constants)
    strides = tuple(n for n in kernel.arg_names if n.startswith("stride_"))
    made = build(kernel, signature, constants, (*pointers, "width", *strides), size.warps, size.stages)
    check(made, size.warps, tensor_core=dtype != torch.float32)


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [*((torch.bfloat16, dim) for dim in (16, 32, 64, 128)), (torch.float32, 64), (torch.float32, 128)],
)
@pytest.mark.parametrize("name", ["_forward", "_backward_queries", "_backward_keys"])
def test_attention_compiles(name: str, dtype: torch.dtype, dim: int) -> None:
    kernel = getattr(attention_triton, name)
    table = triton_config.attention_forward if name == "_forward" else triton_config.attention_backward
    size = table(dtype, dim)
    constants = {"QUERIES": size.rows, "KEYS": size.columns, "DIM": dim, "IEEE": dtype == torch.float32}
    pointers = {n: f"*{NAMES[dtype]}" for n in kernel.arg_names if n.endswith("_ptr")}
    pointers |= {n: "*fp32" for n in ("lse_ptr", "delta_ptr") if n in pointers}
    pointers |= dict.fromkeys(("blocks_ptr", "starts_ptr", "offsets_ptr", "ranges_ptr"), "*i32")
    signature = scalars(kernel, pointers, ("factor", "scale"), constants)
    strides = tuple(n for n in kernel.arg_names if n.startswith("stride_"))
    made = build(kernel, signature, constants, (*pointers, *strides), size.warps, size.stages)
    check(made, size.warps, tensor_core=dtype != torch.float32)
