"""The head's Triton kernels against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.inputs import HeadCase, relative_error
from tests.kernels.test_lm_head import results

CASES = [
    HeadCase(tokens=33, vocab=300),
    HeadCase(tokens=130, vocab=257, width=40, temperature=1.0),
    HeadCase(tokens=20, vocab=300, softcap=5.0),
    HeadCase(tokens=20, vocab=200, rank=5),
    HeadCase(tokens=40, vocab=130, masked=True),
    HeadCase(tokens=50, vocab=301, softcap=3.0, rank=4, masked=True, temperature=0.6),
    HeadCase(tokens=1, vocab=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", ["loss", "logprobs"])
def test_fp32(case: HeadCase, form: str) -> None:
    want = results(case, torch.float64, "reference", "logprobs")
    got, peer = results(case, torch.float32, "triton", form), results(case, torch.float32, "reference", form)
    for g, p, w in zip(got, peer, want, strict=True):
        assert relative_error(g, w) < max(5e-6, 1.25 * relative_error(p, w))


@pytest.mark.parametrize("case", CASES[:6], ids=str)
@pytest.mark.parametrize("form", ["loss", "logprobs"])
def test_bf16_is_as_exact_as_the_bf16_reference(case: HeadCase, form: str) -> None:
    want = results(case, torch.float64, "reference", "logprobs")
    got, peer = (results(case, torch.bfloat16, impl, form) for impl in ("triton", "reference"))
    names = ["loss", "logprob", "entropy", "hidden", "weight", "a", "b"]
    for name, g, p, w in zip(names, got, peer, want, strict=False):
        if name != "loss":
            assert relative_error(g, w) <= 1.25 * relative_error(p, w), name
