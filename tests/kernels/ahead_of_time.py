"""Compile a Triton kernel for a GPU that is not there, and read what the assembler made of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True, slots=True)
class Build:
    """Registers a thread, bytes of stack and of shared memory, and counts of instructions in the machine code."""

    registers: int
    stack: int
    shared: int
    spills: int
    tensor_core: int


def build(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...],
    warps: int,
    stages: int,
    arch: int = 90,
) -> Build:
    """signature: type of every argument ("*bf16", "i32", "fp32"), constants left out; aligned: those that are
    multiples of 16 (pointers: 16-byte aligned)."""
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    at = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(at(name),): value for name, value in constants.items()},
        attrs={(at(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages}
    )
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", cubin)
        code = _run(tools / "nvdisasm", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return Build(int(found[1]), int(found[2]), compiled.metadata.shared, spills, code.count("HGMMA"))


def _run(*command: Any) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout
