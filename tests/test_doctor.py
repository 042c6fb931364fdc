from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import doctor
from engine.doctor import Row, examine


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    rlvr = Path(sys.executable).parent / "rlvr"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([rlvr, "doctor", "--cuda"], capture_output=True, text=True, timeout=120, env=hidden)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rlvr: no GPU here, so nothing of one was tried\n"


@pytest.mark.slow
def test_the_very_rows_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one way to install; what the other does in vLLM is in tests/sync/test_merged_in_vllm.py."""
    monkeypatch.setitem(doctor.TOLERANCE, "float32", 1e-4)
    monkeypatch.setattr(doctor, "INSTALLS", ("adapter",))
    rows = list(examine("cpu", "cpu", "float32"))
    for row in rows:
        print(row.line())
    assert [row.name for row in rows if not row.ok] == []
    names = [row.name for row in rows]
    assert [n for n in names if n.startswith("lm_head")] == ["lm_head float32", "lm_head bfloat16"]
    assert [n.removeprefix("adapter: ") for n in names if n.startswith("adapter")] == [
        "start", "before any sync", "sync 1", "sync 2", "sync 3", "in the middle",
    ]  # fmt: skip


def test_a_part_that_raises_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[torch.Tensor]:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(doctor, "_lora", broken)
    monkeypatch.setattr(doctor, "INSTALLS", ())
    *good, bad = examine("cpu", "cpu", "float32")
    assert [row.name for row in good] == [
        f"{op} {dt}" for op in ("lm_head", "attention") for dt in ("float32", "bfloat16")
    ]
    assert all(row.ok for row in good)
    assert bad == Row("kernels", False, "RuntimeError: no kernel image", 0.0)


def test_a_kernel_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "INSTALLS", ())
    right = doctor.lora_linears

    def wrong(*arguments: object, impl: str, **more: object) -> tuple[torch.Tensor, ...]:
        outs = right(*arguments, impl=impl, **more)  # type: ignore[arg-type]
        return outs if impl == "reference" else tuple(1.1 * y for y in outs)

    monkeypatch.setattr(doctor, "lora_linears", wrong)
    assert [row.name for row in examine("cpu", "cpu", "float32") if not row.ok] == ["lora float32", "lora bfloat16"]
