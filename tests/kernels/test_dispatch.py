"""The dispatch rule: defaults, the override, and refusals that name the argument and the implementation."""

from __future__ import annotations

import logging

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import UnsupportedError, choose, from_environment, pick


@pytest.mark.parametrize(
    ("op", "device", "dtype", "expected"),
    [
        ("lm_head", "cpu", torch.float32, "cpu"),
        ("lm_head", "cpu", torch.bfloat16, "cpu"),
        ("lm_head", "cpu", torch.float64, "reference"),
        ("lm_head", "cuda", torch.bfloat16, "triton"),
        ("lora", "cuda", torch.float64, "reference"),
        ("attention", "cuda", torch.bfloat16, "flash"),
        ("attention", "cuda", torch.float32, "triton"),
    ],
)
def test_defaults(op: str, device: str, dtype: torch.dtype, expected: str) -> None:
    assert choose(op, device=device, dtype=dtype, facts={"head_dim": 64}) == expected


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("lm_head", {"device": "cpu", "dtype": torch.float32, "override": "triton"}, "device=cpu.*'triton'"),
        ("lm_head", {"device": "cuda", "dtype": torch.float32, "override": "cpu"}, "device=cuda.*'cpu'"),
        (
            "lm_head",
            {"device": "cuda", "dtype": torch.float64, "override": "triton"},
            "dtype=float64.*'triton'",
        ),
        ("lm_head", {"device": "cuda", "dtype": torch.float32, "override": "flash"}, "impl='flash'"),
        (
            "lora",
            {"device": "cpu", "dtype": torch.float32, "override": "referense"},
            "did you mean 'reference'",
        ),
        ("norm", {"device": "cpu", "dtype": torch.float32}, "op='norm'"),
        (
            "attention",
            {"device": "cuda", "dtype": torch.float32, "facts": {"head_dim": 80}},
            "head_dim=80.*'triton'",
        ),
        (
            "attention",
            {"device": "cuda", "dtype": torch.float32, "override": "flash"},
            "dtype=float32.*'flash'",
        ),
        (
            "attention",
            {"device": "cuda", "dtype": torch.bfloat16, "facts": {"head_dim": 20}, "override": "flash"},
            "head_dim=20.*'flash'",
        ),
    ],
)
def test_refusals(op: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        choose(op, **arguments)  # type: ignore[arg-type]


def test_interpreter_lets_triton_take_cpu_tensors() -> None:
    assert choose("lora", device="cpu", dtype=torch.float32, interpret=True, override="triton") == "triton"


def test_environment_by_operation_and_for_all() -> None:
    assert from_environment("lora", "") is None
    assert from_environment("lora", "reference") == "reference"
    assert from_environment("lora", "attention=cpu, lora=reference") == "reference"
    assert from_environment("lm_head", "attention=cpu") is None
    with pytest.raises(UnsupportedError, match="'lorra'"):
        from_environment("lora", "lorra=cpu")


def test_argument_beats_environment_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dispatch._say_once.cache_clear()
    monkeypatch.setenv("RLVR_KERNELS", "reference")
    x = torch.zeros(1)
    with caplog.at_level(logging.INFO, logger="rlvr.kernels"):
        assert pick("lora", x, None) == "reference"
        assert pick("lora", x, "cpu") == "cpu"
        assert pick("lora", x, "cpu") == "cpu"
    assert [record.getMessage() for record in caplog.records] == [
        "lora on cpu in float32: reference (RLVR_KERNELS)",
        "lora on cpu in float32: cpu (impl=)",
    ]
