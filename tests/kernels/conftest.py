"""One torch thread for the kernel tests: their inputs are tiny, and threads only get into each other's way."""

from __future__ import annotations

import pytest
import torch

import kernels.dispatch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["widened", "native"])
def bf16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which the `cpu` kernels multiply bf16, whatever this machine would choose."""
    monkeypatch.setattr(kernels.dispatch, "cpu_has_fast_bf16", lambda: request.param == "native")
    return str(request.param)
