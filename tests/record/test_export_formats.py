"""Exports are loaded by the programs that they are for, and compute what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.errors import InputError
from engine.record import merge
from engine.record.export import export_model
from engine.record.formats import export
from engine.snapshot import Snapshot
from tests.record.trained_tiny import KINDS, Made, gap, load_any, logits, make, make_base, save
from tests.rollout.tiny import RANK, SCALE, factors, load, merged
from tests.test_cli import rlvr

EXACT = 1e-5
FAR = 1e-2
WRAPPED = "model.language_model.layers"


@pytest.fixture(scope="module")
def all_made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return {kind: make(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, all_made: dict[str, Made]) -> Made:
    return all_made[request.param]


@pytest.fixture
def tied(all_made: dict[str, Made]) -> Made:
    return all_made["llama-tied"]


def peft() -> Any:
    import peft  # slow to import, and most tests do not need it

    return peft


def names_of(folder: Path) -> set[str]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in file.keys()}  # noqa: SIM118


def bound_by_peft(model: Any, folder: Path, expected: set[str]) -> Any:
    """The model with the adapter, on exactly the layers that are expected, every tensor taken from the file."""
    loaded = peft().PeftModel.from_pretrained(model, folder).eval()
    state = {name: t for name, t in loaded.state_dict().items() if ".lora_" in name}
    file = load_file(folder / "adapter_model.safetensors")
    assert {name.replace(".default.weight", ".weight") for name in state} == set(file)
    assert all(torch.equal(t, file[name.replace(".default.weight", ".weight")]) for name, t in state.items())
    assert names_of(folder) == expected
    return loaded


def test_the_made_adapters_change_their_models(made: Made) -> None:
    assert gap(made.trained, made.plain) > FAR


def test_peft_computes_what_was_trained(made: Made, tmp_path: Path) -> None:
    done = export(made.run, "peft", out=tmp_path / "out")
    loaded = bound_by_peft(load(made.base), done.folder, set(made.factors))
    assert gap(logits(loaded), made.trained) < EXACT
    assert {p.name for p in done.folder.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "training_info.json", "README.md",
    }  # fmt: skip
    info = json.loads((done.folder / "training_info.json").read_text())
    assert (info["base_model"], info["step"], info["rank"], info["format"]) == (str(made.base), 7, RANK, "peft")
    again = export(done.folder, "peft", out=tmp_path / "again")
    for name in ("adapter_model.safetensors", "adapter_config.json", "training_info.json"):
        assert (again.folder / name).read_bytes() == (done.folder / name).read_bytes()


def test_layers_that_share_their_last_part_are_named_in_full(all_made: dict[str, Made], tmp_path: Path) -> None:
    base = all_made["llama"].base
    new = {n: f for n, f in factors(load(base), 2, ("q_proj", "up_proj")).items() if ".layers.1." in n or "up" in n}
    done = export(save(tmp_path / "adapter", new, base), "peft", out=tmp_path / "out")
    config = json.loads((done.folder / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(new)
    loaded = bound_by_peft(load(base), done.folder, set(new))
    assert gap(logits(loaded), logits(merged(base, new))) < EXACT


def test_a_multimodal_wrapper_gets_its_prefix(all_made: dict[str, Made], tmp_path: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    made = all_made["wrapper"]
    plain = export(made.run, "peft", out=tmp_path / "plain")
    assert any("--prefix model.language_model.layers" in line for line in plain.lines)
    done = export(made.run, "peft", prefix=WRAPPED, out=tmp_path / "out")
    expected = {name.replace("model.layers", WRAPPED) for name in made.factors}
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(made.base, dtype=torch.float32)
    loaded = bound_by_peft(whole, done.folder, expected)
    assert gap(logits(loaded), made.trained) < EXACT
    back = export(done.folder, "peft", prefix="model.layers", out=tmp_path / "back")
    assert names_of(back.folder) == set(made.factors)
    same = (back.folder / "adapter_config.json").read_text()
    assert same == (plain.folder / "adapter_config.json").read_text()


@pytest.mark.slow  # imports vLLM
def test_vllm_finds_a_wrapper_s_layers_under_its_prefix_alone(all_made: dict[str, Made], tmp_path: Path) -> None:
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.model_executor.models.utils import WeightsMapper

    # As vLLM 0.32 says it in qwen3_vl.py and qwen3_5.py, which can't be imported without torchvision.
    whole = WeightsMapper(
        orig_to_new_prefix={"lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model."}
    )
    text = WeightsMapper(orig_to_new_prefix={"model.language_model.": "model."})
    made = all_made["wrapper"]
    inside = {f"language_model.{name}" for name in made.factors}
    for prefix, found in (("model.layers", {"language_model.lm_head"}), (WRAPPED, inside)):
        folder = export(made.run, "peft", prefix=prefix, out=tmp_path / prefix).folder
        keys = load_file(folder / "adapter_model.safetensors").keys()
        assert {parse_fine_tuned_lora_name(key, whole)[0] for key in keys} & inside == found
        assert {parse_fine_tuned_lora_name(key, text)[0] for key in keys} == set(made.factors)


def test_a_merged_model_computes_what_was_trained(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "BLOCK_ELEMENTS", 100)  # a few rows at a time
    done = export(made.run, "merged", out=tmp_path / "out")
    assert gap(logits(load_any(done.folder)), made.trained) < EXACT
    assert any("0.0% of their weights" in line for line in done.lines)
    before, after = load_file(made.base / "model.safetensors"), load_file(done.folder / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    touched = {name for name in before if name not in same}
    assert len(touched) == len(made.factors) - (set(after) != set(before))
    assert set(after) - set(before) == ({"lm_head.weight"} if "tied" in str(made.base) else set())
    config = json.loads((done.folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert any("head was tied" in line for line in done.lines) == ("tied" in str(made.base))


def test_a_tied_head_without_factors_stays_tied(tmp_path: Path) -> None:
    made = make("llama-tied", tmp_path, ("q_proj",))
    done = export(made.run, "merged")
    assert done.folder == made.run / "exports" / "merged-step-000007"
    assert json.loads((done.folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(done.folder / "model.safetensors")
    assert gap(logits(load_any(done.folder)), made.trained) < EXACT


def test_shards_their_index_and_the_files_beside_them_are_kept(tmp_path: Path) -> None:
    made = make("llama-tied", tmp_path, max_shard_size="30KB")
    (made.base / "tokenizer.json").write_text("{}")
    (made.base / "chat_template.jinja").write_text("{{ messages }}")
    (made.base / "weights.bin").write_text("old")
    done = export(made.run, "merged", any_base=True)
    index, theirs = (json.loads((f / merge.INDEX).read_text()) for f in (done.folder, made.base))
    assert len(set(theirs["weight_map"].values())) > 2
    head = theirs["weight_map"]["model.embed_tokens.weight"]
    assert index["weight_map"] == {**theirs["weight_map"], "lm_head.weight": head}
    files = [load_file(done.folder / name) for name in set(index["weight_map"].values())]
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files for t in tensors.values())
    assert {"tokenizer.json", "chat_template.jinja"} <= {p.name for p in done.folder.iterdir()}
    assert not (done.folder / "weights.bin").exists()
    assert gap(logits(load_any(done.folder)), made.trained) < EXACT


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_a_merge_is_summed_in_fp32_and_then_cast(tmp_path: Path, dtype: str | None) -> None:
    base = make_base("llama", tmp_path / "base")
    weights = {name: t.bfloat16() for name, t in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    new = {n: (a, b * 1e-3) for n, (a, b) in factors(load(base), 3).items()}
    done = export(save(tmp_path / "adapter", new, base), "merged", dtype=dtype, out=tmp_path / "out")
    after = load_file(done.folder / "model.safetensors")
    target = merge.DTYPES[dtype or "bfloat16"]
    assert {t.dtype for t in after.values()} == {target}
    unmoved = total = 0
    for name, weight in weights.items():
        pair = new.get(name.removesuffix(".weight"))
        delta = SCALE * (pair[1] @ pair[0]) if pair else torch.zeros(())
        assert torch.equal(after[name], (weight.float() + delta).to(target)), name
        if pair:
            unmoved += int((after[name] == weight.to(target)).sum())
            total += weight.numel()
    assert any(f"{unmoved / total:.1%} of their weights" in line for line in done.lines), done.lines
    assert (unmoved / total > 0.1) == (target != torch.float32)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["dtype"] == (dtype or "float32")  # where nothing is asked for, config.json stays as it was


def test_sglang_s_split_is_exact(all_made: dict[str, Made], tmp_path: Path) -> None:
    made = all_made["hybrid"]
    done = export(made.run, "sglang", out=tmp_path / "out")
    tensors = load_file(done.folder / "adapter_model.safetensors")
    key, value = 16, 32
    fused = [name for name in made.factors if name.endswith("in_proj_qkv")]
    assert len(fused) == 3
    for name, (a, b) in made.factors.items():
        stem, _, leaf = name.rpartition(".")
        parts = [f"{stem}.in_proj_{x}" for x in "qkv"] if leaf == "in_proj_qkv" else [name]
        pairs = [[tensors.pop(f"base_model.model.{part}.lora_{x}.weight") for x in "AB"] for part in parts]
        if leaf == "in_proj_qkv":
            assert [len(pair[1]) for pair in pairs] == [key, key, value]
        assert all(torch.equal(pair[0], a) for pair in pairs)
        assert torch.equal(torch.cat([pair[1] for pair in pairs]), b)
        assert torch.equal(torch.cat([pair[1] @ pair[0] for pair in pairs]), b @ a)
    assert not tensors
    targets = json.loads((done.folder / "adapter_config.json").read_text())["target_modules"]
    assert {"in_proj_q", "in_proj_k", "in_proj_v"} <= set(targets)
    assert "in_proj_qkv" not in targets
    with pytest.raises(InputError, match="split layers"):
        export(done.folder, "peft", out=tmp_path / "no")


def test_sglang_says_where_nothing_is_split_and_what_it_may_drop(all_made: dict[str, Made], tmp_path: Path) -> None:
    dense = export(all_made["qwen3"].run, "sglang", out=tmp_path / "dense")
    assert any("the same as peft" in line for line in dense.lines)
    made = make("hybrid", tmp_path, ("in_proj_a", "in_proj_qkv"))
    assert any("3 layers are in_proj_a" in line for line in export(made.run, "sglang").lines)


def test_whole_weights_are_exported_merged_alone(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    model = load(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    export_model(tmp_path / "run" / "model", model, Snapshot(str(base), base, "h"), 3)
    done = export(tmp_path / "run", "merged", dtype="bfloat16")
    assert torch.equal(load_file(done.folder / "model.safetensors")["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert json.loads((done.folder / "training_info.json").read_text())["format"] == "merged"
    with pytest.raises(InputError, match=r"whole weights.*--format merged"):
        export(tmp_path / "run", "peft")


def test_steps_of_a_run(tied: Made, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tied.run / "adapter", run / "adapter")
    for step, seed in ((2, 5), (4, 6)):
        save(run / "checkpoints" / f"step-{step:06d}" / "adapter", factors(load(tied.base), seed), tied.base, step=step)
    (run / "checkpoints" / "step-000006.part" / "adapter").mkdir(parents=True)
    done = export(run, "peft", step=4)
    assert done.folder == run / "exports" / "peft-step-000004"
    name = next(iter(factors(load(tied.base), 6)))
    key = f"base_model.model.{name}.lora_A.weight"
    assert torch.equal(load_file(done.folder / "adapter_model.safetensors")[key], factors(load(tied.base), 6)[name][0])
    assert export(run, "peft", step=7).folder == run / "exports" / "peft-step-000007"  # the end of the run
    with pytest.raises(InputError, match=r"--step 6: no such step; there are: 2, 4, 7$"):
        export(run, "peft", step=6)
    shutil.rmtree(run / "adapter")
    with pytest.raises(InputError, match=r"not finished.*there are: 2, 4$"):
        export(run, "peft")


def copied(made: Made, folder: Path) -> Path:
    return shutil.copytree(made.run / "adapter", folder)


def edited(made: Made, folder: Path, file: str, **values: object) -> Path:
    path = copied(made, folder) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def without(made: Made, folder: Path, file: str) -> Path:
    (copied(made, folder) / file).unlink()
    return folder


def torn(made: Made, folder: Path) -> Path:
    path = copied(made, folder) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def of_another_shape(made: Made, folder: Path) -> Path:
    new = {name: (a[:, :-1].contiguous(), b) for name, (a, b) in made.factors.items()}
    return save(folder, new, made.base)


def of_other_names(made: Made, folder: Path) -> Path:
    new = {name.replace("self_attn", "attention"): pair for name, pair in made.factors.items()}
    return save(folder, new, made.base)


def taken(made: Made, folder: Path) -> Path:
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "thesis.txt").write_text("precious")
    return copied(made, folder)


@pytest.mark.parametrize(
    ("prepare", "options", "words"),
    [
        (copied, {"form": "merge"}, ["--format merge", "did you mean merged?", "peft, merged, sglang"]),
        (copied, {"form": "merged", "dtype": "bf16"}, ["--dtype bf16", "bfloat16"]),
        (copied, {"dtype": "float32"}, ["--dtype", "fp32"]),
        (copied, {"form": "merged", "prefix": "model.layers"}, ["--prefix", "merged"]),
        (copied, {"prefix": "model.language_model"}, ["model.language_model", "model.language_model.layers?"]),
        (copied, {"prefix": "model..layers"}, ["model..layers", "dotted path"]),
        (copied, {"step": 3}, ["--step 3", "one adapter"]),
        (copied, {"out": None}, ["--out DIR"]),
        (taken, {}, ["out", "holds something"]),
        (lambda made, folder: folder, {}, ["no such folder"]),
        (lambda made, folder: made.base, {}, ["neither a run"]),
        (lambda made, folder: without(made, folder, "training_info.json"), {}, ["training_info.json", "is missing"]),
        (lambda made, folder: without(made, folder, "adapter_config.json"), {}, ["adapter_config.json", "is missing"]),
        (lambda made, folder: without(made, folder, "adapter_model.safetensors"), {}, ["adapter_model", "is missing"]),
        (torn, {}, ["adapter_model.safetensors", "torn"]),
        (lambda made, folder: edited(made, folder, "adapter_config.json", r=8), {}, ["rank 8", "says 4"]),
        (
            lambda made, folder: edited(made, folder, "training_info.json", rank=8),
            {},
            ["adapter_config.json says rank 4", "says 8"],
        ),
        (
            lambda made, folder: edited(made, folder, "adapter_config.json", use_dora=True),
            {},
            ["use_dora", "plain LoRA"],
        ),
        (
            lambda made, folder: edited(made, folder, "training_info.json", base_model_sha256="beef"),
            {},
            ["sha256 beef", "--model SOURCE", "--any-base"],
        ),
        (
            lambda made, folder: edited(made, folder, "training_info.json", base_model="/gone"),
            {},
            ["/gone", "--model SOURCE"],
        ),
        (of_another_shape, {}, ["no adapter of", "lm_head is 131 x 31 in the adapter, 131 x 32 in the base"]),
        (of_other_names, {}, ["no adapter of", "attention.o_proj", "no such linear layer"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_message_and_nothing_is_left(
    tied: Made, tmp_path: Path, prepare: Any, options: dict[str, Any], words: list[str]
) -> None:
    run = prepare(tied, tmp_path / "adapter")
    there = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(InputError) as refused:
        export(run, **{"form": "peft", "out": tmp_path / "out", **options})
    assert all(word in str(refused.value) for word in words), refused.value
    assert sorted(str(p) for p in tmp_path.rglob("*")) == there


def test_another_base_is_refused_and_taken_when_it_is_asked_for(all_made: dict[str, Made], tmp_path: Path) -> None:
    tied, untied = all_made["llama-tied"], all_made["llama"]
    with pytest.raises(InputError, match="another model"):
        export(tied.run, "peft", source=str(untied.base), out=tmp_path / "no")
    moved = shutil.copytree(tied.base, tmp_path / "moved")
    same = export(tied.run, "merged", source=str(moved), out=tmp_path / "same")
    assert gap(logits(load_any(same.folder)), tied.trained) < EXACT
    (moved / "notes.txt").write_text("mine")
    assert export(tied.run, "peft", source=str(moved), any_base=True, out=tmp_path / "yes").folder.is_dir()
    with pytest.raises(InputError, match=r"no adapter of.*in_proj_qkv"):
        export(all_made["hybrid"].run, "peft", source=str(untied.base), any_base=True, out=tmp_path / "never")


def test_copies_of_the_base_s_weights_are_left_out(tied: Made, tmp_path: Path) -> None:
    folder = copied(tied, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.base_layer.weight"] = torch.zeros(131, 32)
    save_file(tensors, folder / "adapter_model.safetensors")
    done = export(folder, "peft", out=tmp_path / "out")
    assert names_of(done.folder) == set(tied.factors)


@pytest.mark.slow  # two processes that import torch
def test_the_command_says_what_it_did_or_why_not(tied: Made, tmp_path: Path) -> None:
    done = rlvr("export", str(tied.run), "--format", "merged", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "21 layers are W + 0.7 B A, summed in fp32, written as float32"
    assert said[-1] == "merged: out"
    refused = rlvr("export", str(tied.run), "--format", "peftt", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "rlvr: --format peftt: unknown; did you mean peft? (peft, merged, sglang)\n"
