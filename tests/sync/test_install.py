from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.sync.install import MergedInstall, find_targets, read_weights


class Fused(nn.Module):
    """The shape of one of vLLM's decoder layers: q, k and v stacked in one module, o alone."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        stacked = torch.cat([weights[f"x.{n}_proj.weight"] for n in "qkv"]).to(dtype)
        self.x = nn.ModuleDict({"qkv_proj": linear(stacked), "o_proj": linear(weights["x.o_proj.weight"].to(dtype))})


def linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    from safetensors.torch import save_file

    rows = {"q": 6, "k": 2, "v": 2, "o": 5}
    generator = torch.Generator().manual_seed(0)
    weights = {f"x.{n}_proj.weight": torch.randn(r, 4, generator=generator) for n, r in rows.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path, weights


def factors(weights: dict[str, torch.Tensor], seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name.removesuffix(".weight"): (
            torch.randn(3, 4, generator=generator),
            torch.randn(len(w), 3, generator=generator),
        )
        for name, w in weights.items()
        if "k_proj" not in name
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_is_exact_in_fp32_from_the_pristine_copy_however_often_it_is_installed(
    base: tuple[Path, dict[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    folder, weights = base
    model = Fused(weights, dtype)
    pointers = [p.data_ptr() for p in model.parameters()]
    install = MergedInstall(model, str(folder), list(factors(weights, 0)))
    for seed in (*range(20), 3):
        new = factors(weights, seed)
        install.write(new, scale=0.3)
        merged = {
            name: w + 0.3 * (new[p][1] @ new[p][0]) if (p := name.removesuffix(".weight")) in new else w
            for name, w in weights.items()
        }
        stacked = torch.cat([merged[f"x.{n}_proj.weight"] for n in "qkv"])
        assert torch.allclose(model.x["qkv_proj"].weight.float(), stacked.to(dtype).float(), atol=1e-6)
        assert torch.allclose(model.x["o_proj"].weight.float(), merged["x.o_proj.weight"].to(dtype).float(), atol=1e-6)
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_a_factor_without_a_place_fails_with_its_name(base: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = Fused(base[1], torch.float32)
    with pytest.raises(LookupError, match=r"x\.q_porj, y\.o_proj"):
        find_targets(model, ["x.q_proj", "x.q_porj", "y.o_proj"])
    with pytest.raises(LookupError, match="no tensor"):
        read_weights(base[0], ["x.q_proj.weight", "nope"])
