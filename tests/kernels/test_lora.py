"""Grouped LoRA linears against autograd of the formula in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import UnsupportedError
from kernels.lora import lora_linears
from kernels.lora_cpu import CHUNK_ROWS
from tests.kernels.inputs import relative_error

Inputs = tuple[
    torch.Tensor,
    list[torch.Tensor],
    list[tuple[torch.Tensor, torch.Tensor] | None],
    list[torch.Tensor | None],
]


def make_inputs(
    dtype: torch.dtype,
    tokens: int = 37,
    width: int = 48,
    outs: tuple[int, ...] = (48, 16, 20),
    ranks: tuple[int, ...] = (4, 8, 4),
    bias: bool = False,
) -> Inputs:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    wide = torch.promote_types(dtype, torch.float32)
    x = normal(tokens, width).to(dtype).requires_grad_()
    weights = [normal(out, width).to(dtype) for out in outs]
    factors: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for out, rank in zip(outs, ranks, strict=True):
        pair = (normal(rank, width).to(wide).requires_grad_(), normal(out, rank).to(wide).requires_grad_())
        factors.append(pair if rank else None)
    biases = [normal(out).to(dtype) if bias and i != 1 else None for i, out in enumerate(outs)]
    return x, weights, factors, biases


def outputs_and_gradients(inputs: Inputs, impl: str) -> list[torch.Tensor]:
    x, weights, factors, biases = inputs
    outputs = lora_linears(x, weights, factors, 0.5, biases=biases, impl=impl)
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for y in outputs]
    leaves = [x, *(t for pair in factors if pair is not None for t in pair)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


CASES = [
    {},
    {"bias": True},
    {"outs": (40,), "ranks": (16,)},
    {"outs": (33, 7), "ranks": (0, 3)},
    {"outs": (24, 24), "ranks": (0, 0)},
    {"tokens": 1},
    {"tokens": 4},
    {"tokens": 200, "width": 24, "outs": (32,), "ranks": (8,)},
    {"tokens": 2 * CHUNK_ROWS + 77, "bias": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_cpu_equals_reference(case: dict, dtype: torch.dtype, limit: float) -> None:
    got = outputs_and_gradients(make_inputs(dtype, **case), "cpu")
    want = outputs_and_gradients(make_inputs(torch.float64, **case), "reference")
    assert len(got) == len(want)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < limit


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bf16_is_as_exact_as_the_bf16_reference(case: dict, bf16_products: str) -> None:
    want = outputs_and_gradients(make_inputs(torch.float64, **case), "reference")
    got, peer = (outputs_and_gradients(make_inputs(torch.bfloat16, **case), impl) for impl in ("cpu", "reference"))
    for g, p, w in zip(got, peer, want, strict=True):
        assert relative_error(g, w) <= 1.25 * relative_error(p, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_fp32_masters_are_fp32(dtype: torch.dtype) -> None:
    x, weights, factors, biases = make_inputs(dtype)
    outputs = lora_linears(x, weights, factors, 0.5, biases=biases, impl="cpu")
    sum(y.float().square().sum() for y in outputs).backward()
    assert all(y.dtype == dtype for y in outputs)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    for pair in factors:
        assert pair is not None
        assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in pair)


def test_gradient_by_finite_differences() -> None:
    x, weights, factors, _ = make_inputs(torch.float64, tokens=3, width=5, outs=(4, 2), ranks=(2, 3))
    leaves = [t for pair in factors if pair is not None for t in pair]

    def forward(x: torch.Tensor, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return lora_linears(x, weights, [(flat[0], flat[1]), (flat[2], flat[3])], 0.7, impl="cpu")

    assert torch.autograd.gradcheck(forward, (x, *leaves))


def test_input_without_gradient() -> None:
    """The first layer's input wants none; the factors' gradients are the same."""
    inputs = make_inputs(torch.float32)
    want = outputs_and_gradients(inputs, "cpu")
    x, weights, factors, _ = inputs
    outputs = lora_linears(x.detach(), weights, factors, 0.5, impl="cpu")
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for y in outputs]
    leaves = [t for pair in factors if pair is not None for t in pair]
    got = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(g, w) for g, w in zip(got, want[-len(leaves) :], strict=True))


def test_an_unused_output_counts_as_zero() -> None:
    x, weights, factors, _ = make_inputs(torch.float64)
    got, want = (
        torch.autograd.grad(lora_linears(x, weights, factors, 0.5, impl=impl)[1].sum(), [x, *factors[1]])
        for impl in ("cpu", "reference")
    )
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 1e-14


def test_what_is_refused() -> None:
    x, weights, factors, _ = make_inputs(torch.float32)
    with pytest.raises(UnsupportedError, match=r"weights\[0\].*frozen"):
        lora_linears(x, [weights[0].clone().requires_grad_(), *weights[1:]], factors, 1.0)
    with pytest.raises(ValueError, match=r"weights\[1\] must be"):
        lora_linears(x, [weights[0], weights[1][:, :3], weights[2]], factors, 1.0)
    with pytest.raises(ValueError, match=r"factors\[0\] must be"):
        lora_linears(x, weights, [factors[1], *factors[1:]], 1.0)
    with pytest.raises(ValueError, match="need as many"):
        lora_linears(x, weights, factors[:2], 1.0)
    with pytest.raises(ValueError, match=r"weights\[2\] is torch.float64"):
        lora_linears(x, [*weights[:2], weights[2].double()], factors, 1.0)
    with pytest.raises(ValueError, match=r"biases\[0\]"):
        lora_linears(x, weights, factors, 1.0, biases=[torch.zeros(3), None, None])


def test_both_ways_of_the_low_rank_part_are_tested() -> None:
    from kernels.lora_cpu import merges

    ways = {
        merges(make_inputs(torch.float32, **c)[0].shape[0], w, torch.float32)
        for c in CASES
        for w in make_inputs(torch.float32, **c)[1]
    }
    assert ways == {True, False}


def test_a_tiny_update_is_not_lost_in_the_effective_weight() -> None:
    """Early in training B A is far below the weight: outputs stay at fp32's own error, gradients at theirs."""
    x, weights, factors, _ = make_inputs(torch.float32, tokens=400)
    small = [(a.detach().requires_grad_(), (b.detach() * 1e-6).requires_grad_()) for a, b in factors]
    got = outputs_and_gradients((x, weights, small, [None] * 3), "cpu")
    wide = (
        x.detach().double().requires_grad_(),
        [w.double() for w in weights],
        [(a.detach().double().requires_grad_(), b.detach().double().requires_grad_()) for a, b in small],
        [None] * 3,
    )
    want = outputs_and_gradients(wide, "reference")
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 2e-6
