from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.sync.adapter import AdapterInstall
from engine.sync.merged import MergedInstall
from engine.sync.places import find_places

Weights = dict[str, torch.Tensor]


class Fused(nn.Module):
    """The shape of one of vLLM's decoder layers: q, k and v stacked in one module, o alone."""

    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    }

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.x = nn.ModuleDict(
            {
                "qkv_proj": linear(torch.cat([weights[f"x.{n}_proj.weight"] for n in "qkv"]).to(dtype)),
                "o_proj": linear(weights["x.o_proj.weight"].to(dtype)),
                "in_proj_qkvz": linear(torch.cat([weights[f"x.in_proj_{n}.weight"] for n in ("qkv", "z")]).to(dtype)),
            }
        )
        self.embed_tokens = nn.Embedding.from_pretrained(weights["embed_tokens.weight"].to(dtype))
        self.lm_head = nn.Linear(4, 9, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, Weights]:
    rows = {
        "x.q_proj": 6,
        "x.k_proj": 2,
        "x.v_proj": 2,
        "x.o_proj": 5,
        "x.in_proj_qkv": 8,
        "x.in_proj_z": 3,
        "embed_tokens": 9,
    }
    generator = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(r, 4, generator=generator) for name, r in rows.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path, weights


def factors(weights: Weights, seed: int, rank: int = 3) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of every layer but k and the embedding, neighbours in a fused one included."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name.removesuffix(".weight"): (
            torch.randn(rank, 4, generator=generator),
            torch.randn(len(w), rank, generator=generator),
        )
        for name, w in weights.items()
        if "k_proj" not in name and "embed" not in name
    }


def copy_into(sent: dict[str, Any], new: dict[str, Any]) -> None:
    for name, group in new.items():
        for into, value in zip(sent[name], group, strict=True):
            into.copy_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_is_exact_in_fp32_from_the_pristine_copy_however_often_it_is_installed(
    base: tuple[Path, Weights], dtype: torch.dtype
) -> None:
    folder, weights = base
    model = Fused(weights, dtype)
    pointers = [p.data_ptr() for p in model.parameters()]
    sent = factors(weights, 0)
    install = MergedInstall(model, str(folder), sent, scale=0.3)
    for seed in (*range(20), 3):
        copy_into(sent, factors(weights, seed))
        install.write()
    merged = {
        name: w + 0.3 * (sent[p][1] @ sent[p][0]) if (p := name.removesuffix(".weight")) in sent else w
        for name, w in weights.items()
    }
    for leaf, parts in {**Fused.packed_modules_mapping, "o_proj": ["o_proj"]}.items():
        stacked = torch.cat([merged[f"x.{part}.weight"] for part in parts])
        assert torch.allclose(model.x[leaf].weight.float(), stacked.to(dtype).float(), atol=1e-6)
    assert torch.equal(model.embed_tokens.weight.float(), weights["embed_tokens.weight"].to(dtype).float())
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_whole_weights_and_factors_go_through_the_same_door(base: tuple[Path, Weights]) -> None:
    folder, weights = base
    model = Fused(weights, torch.float32)
    sent: dict[str, tuple[torch.Tensor, ...]] = {
        **{f"x.{n}_proj.weight": (torch.randn_like(weights[f"x.{n}_proj.weight"]),) for n in "qkv"},
        "embed_tokens.weight": (torch.randn(9, 4),),
        "x.o_proj": (torch.randn(3, 4), torch.randn(5, 3)),
    }
    MergedInstall(model, str(folder), sent, scale=2.0).write()
    assert torch.equal(model.x["qkv_proj"].weight, torch.cat([sent[f"x.{n}_proj.weight"][0] for n in "qkv"]))
    a, b = sent["x.o_proj"]
    assert torch.allclose(model.x["o_proj"].weight, weights["x.o_proj.weight"] + 2 * b @ a, atol=1e-5)
    assert torch.equal(model.lm_head.weight, sent["embed_tokens.weight"][0])  # the tied head goes with it
    assert model.lm_head.weight is model.embed_tokens.weight


def test_factors_of_a_tied_head_leave_the_embedding_as_it_was(base: tuple[Path, Weights]) -> None:
    folder, weights = base
    model = Fused(weights, torch.float32)
    a, b = torch.randn(3, 4), torch.randn(9, 3)
    MergedInstall(model, str(folder), {"lm_head": (a, b)}, scale=1.0).write()
    assert torch.allclose(model.lm_head.weight, weights["embed_tokens.weight"] + b @ a, atol=1e-5)
    assert torch.equal(model.embed_tokens.weight, weights["embed_tokens.weight"])


def test_what_has_no_place_or_another_shape_fails_with_its_name(base: tuple[Path, Weights]) -> None:
    folder, weights = base
    model = Fused(weights, torch.float32)
    with pytest.raises(LookupError, match=r"x\.q_porj\.weight, y\.o_proj\.weight"):
        find_places(model, ["x.q_proj.weight", "x.q_porj.weight", "y.o_proj.weight"])
    with pytest.raises(ValueError, match=r"x\.o_proj\.weight is \(5, 4\)"):
        MergedInstall(model, str(folder), {"x.o_proj": (torch.zeros(3, 4), torch.zeros(6, 3))}, 1.0)
    with pytest.raises(ValueError, match=r"x\.o_proj\.weight"):
        MergedInstall(model, str(folder), {"x.o_proj.weight": (torch.zeros(5, 3),)}, 1.0)
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(LookupError, match=r"no tensor x\.o_proj\.weight"):
        MergedInstall(model, str(folder), {"x.o_proj": (torch.zeros(3, 4), torch.zeros(5, 3))}, 1.0)


def test_a_layer_that_is_split_over_devices_is_refused(base: tuple[Path, Weights]) -> None:
    folder, weights = base
    model = Fused(weights, torch.float32)
    model.x["o_proj"].tp_size = 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match="split over 2 devices"):
        MergedInstall(model, str(folder), {"x.o_proj": (torch.zeros(3, 4), torch.zeros(5, 3))}, 1.0)


def test_the_adapter_takes_no_whole_weights() -> None:
    with pytest.raises(ValueError, match=r"whole weights: x\.weight"):
        AdapterInstall(None, {"x.weight": (torch.zeros(2, 2),)}, 1.0)
