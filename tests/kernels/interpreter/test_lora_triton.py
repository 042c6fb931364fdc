"""The LoRA linears' kernel against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.inputs import relative_error
from tests.kernels.test_lora import CASES, make_inputs, outputs_and_gradients


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32(case: dict) -> None:
    got = outputs_and_gradients(make_inputs(torch.float32, **case), "triton")
    want = outputs_and_gradients(make_inputs(torch.float64, **case), "reference")
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 2e-6


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_is_as_exact_as_the_half_reference(case: dict, dtype: torch.dtype) -> None:
    want = outputs_and_gradients(make_inputs(torch.float64, **case), "reference")
    got, peer = (outputs_and_gradients(make_inputs(dtype, **case), impl) for impl in ("triton", "reference"))
    for g, p, w in zip(got, peer, want, strict=True):
        assert relative_error(g, w) <= 1.25 * relative_error(p, w)


def test_several_tiles_in_every_direction() -> None:
    case = {"tokens": 150, "width": 100, "outs": (130, 70), "ranks": (5, 17)}
    got = outputs_and_gradients(make_inputs(torch.float32, **case), "triton")
    want = outputs_and_gradients(make_inputs(torch.float64, **case), "reference")
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 2e-6
