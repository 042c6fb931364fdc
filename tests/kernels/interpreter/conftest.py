"""Triton's interpreter, made trustworthy: int32 overflow is an error, and bf16 is rounded arithmetic.

These tests run in a process of their own with TRITON_INTERPRET=1 (`test_triton.py` starts it): Triton reads
the variable when a kernel is decorated, and nothing else in the suite may see an interpreted kernel.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def _widen(handle: Any) -> np.ndarray:
    """A handle's numbers; the interpreter keeps bf16 as the upper 16 bits of fp32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _narrow(x: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, to nearest even, NaN kept."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def make_interpreter_exact() -> None:
    """Overflow checks on; dot, unary and binary operations of bf16 computed in fp32 and rounded once."""
    builder = interpreter.InterpreterBuilder
    plain_cast = builder.cast_impl
    plain_dot, plain_binary, plain_unary = builder.create_dot, builder.binary_op, builder.unary_op

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any, **named: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_widen(x), tl.float32) for x in (a, b))
        return plain_dot(self, a, b, d, *rest, **named)

    def binary(self: Any, left: Any, right: Any, op: Callable) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return plain_binary(self, left, right, op)
        out = op(_widen(left), _widen(right))
        if out.dtype == np.bool_:
            return interpreter.TensorHandle(out, tl.int1)
        return interpreter.TensorHandle(_narrow(out), tl.bfloat16)

    def unary(self: Any, x: Any, op: Callable) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return plain_unary(self, x, op)
        return interpreter.TensorHandle(_narrow(op(_widen(x))), tl.bfloat16)

    def cast(self: Any, x: Any, to: Any) -> Any:
        # The interpreter truncates fp32 to bf16; a GPU rounds to nearest even.
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_narrow(x.data), tl.bfloat16)
        return plain_cast(self, x, to)

    builder.create_dot, builder.binary_op, builder.unary_op, builder.cast_impl = dot, binary, unary, cast
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, debug=True, sanitize_overflow=True)


if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    make_interpreter_exact()
