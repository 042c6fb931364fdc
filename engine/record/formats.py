"""`rlvr export`: what a run trained, in the form that others load: PEFT's, a merged model, or SGLang's."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from engine.errors import InputError
from engine.record import merge
from engine.record.card import card
from engine.record.trained import (
    CONFIG,
    INFO,
    TENSORS,
    Outline,
    Trained,
    base_of,
    by_base_names,
    layers_prefix,
    outline,
    read,
    with_prefix,
)
from engine.snapshot import Snapshot
from engine.types import Factors

FORMATS = ("peft", "merged", "sglang")
PREFIXES = ("model.layers", "model.language_model.layers")
"""Of the decoder layers: in a text-only model, and in a multimodal wrapper around it."""
COMPANIONS = (".json", ".jinja", ".model", ".txt")
"""Endings of the files beside a model's weights: its configuration, its tokenizer and its chat template."""
FUSED, SPLIT = "in_proj_qkv", ("in_proj_q", "in_proj_k", "in_proj_v")
UNSERVED = ("in_proj_a", "in_proj_b")
"""Layers whose factors SGLang has dropped without an error."""
TIE = "tie_word_embeddings"
_HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)@([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Exported:
    """Where an export went, and what there is to say of it, a line each."""

    folder: Path
    lines: tuple[str, ...]


def export(
    run: Path,
    form: str,
    *,
    step: int | None = None,
    prefix: str | None = None,
    dtype: str | None = None,
    out: Path | None = None,
    source: str | None = None,
    any_base: bool = False,
) -> Exported:
    """Write what `run`, a run's folder or an adapter's, holds at `step` into `out`, whole or not at all.

    form: one of `FORMATS`. prefix: of the decoder layers, for adapters. dtype: of a merged model's weights, where it is
    not to be the base's. source: where the base model is, if not where it was. any_base: take it with another hash.
    Raises InputError with one message for everything that can be wrong.
    """
    _check_choices(form, prefix, dtype)
    trained = read(run, step)
    if trained.factors is None and form != "merged":
        raise InputError(f"{trained.folder} holds whole weights, there is no adapter to write: use --format merged")
    out = _choose(out, run, trained, form)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".exporting-") as scratch:
        aside = Path(scratch) / "export"
        aside.mkdir()
        base = base_of(trained, source, any_base=any_base) if trained.factors is not None else None
        if base is None:
            lines, more = _whole(trained, dtype, aside)
        elif form == "merged":
            lines, more = _merged(trained, base, dtype, aside)
        else:
            lines, more = _adapter(trained, base, form, prefix, aside)
        info = {**trained.info, "format": form, **more}
        (aside / INFO).write_text(json.dumps(info, indent=2) + "\n")
        (aside / "README.md").write_text(card(info))
        if out.exists():
            out.rmdir()  # it is empty
        aside.rename(out)
    return Exported(out, tuple(lines))


def _check_choices(form: str, prefix: str | None, dtype: str | None) -> None:
    for option, value, known in (("--format", form, FORMATS), ("--dtype", dtype, tuple(merge.DTYPES))):
        if value is not None and value not in known:
            near = difflib.get_close_matches(value, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else "known:"
            raise InputError(f"{option} {value}: unknown; {hint} ({', '.join(known)})")
    if form == "merged" and prefix is not None:
        raise InputError("--prefix names an adapter's layers; a merged model has the names of its base")
    if form != "merged" and dtype is not None:
        raise InputError(f"--dtype is for --format merged; an adapter is written in fp32, also as {form}")
    if prefix is not None and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", prefix):
        raise InputError(f"--prefix {prefix!r}: it is a dotted path of modules, such as {' or '.join(PREFIXES)}")


def _choose(out: Path | None, run: Path, trained: Trained, form: str) -> Path:
    """The folder to write, which holds nothing; its parent is made."""
    if out is None:
        if trained.folder == run:
            raise InputError(f"{run} is no run's folder: say where the export goes with --out DIR")
        out = run / "exports" / f"{form}-step-{int(trained.info['step']):06d}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: it holds something already; name a new or empty folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {out.parent} can't be made: {error.strerror}") from None
    return out


def _adapter(
    trained: Trained, base: Snapshot, form: str, prefix: str | None, folder: Path
) -> tuple[list[str], dict[str, Any]]:
    layers = outline(base.folder)
    factors = by_base_names(trained, base, layers)
    lines = []
    own = _target_modules(layers, list(factors))
    if prefix is not None:
        _check_prefix(prefix, layers)
        factors = with_prefix(factors, prefix)
        own = own if prefix == layers.prefix else sorted(factors)
    elif "vision_config" in json.loads((base.folder / "config.json").read_text()):
        lines.append(
            f"the base is a multimodal model: a server that loads it whole wants --prefix {PREFIXES[1]} and applies "
            f"nothing of an adapter under {layers.prefix}"
        )
    if form == "sglang":
        factors, own, said = _split(factors, own, layers.config)
        lines += said
    tensors = {}
    for name, (a, b) in factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    config = {**trained.config, **_base_name(str(trained.info["base_model"])), "target_modules": own}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    shutil.copymode(folder / CONFIG, folder / TENSORS)  # safetensors gives its files to their owner alone
    lines.insert(0, f"{len(factors)} layers, {len(tensors)} tensors in fp32, rank {trained.config['r']}")
    found = next((p for name in factors if (p := layers_prefix(name))), "")
    return lines, {"rank": trained.config["r"], "prefix": found}


def _target_modules(layers: Outline, names: list[str]) -> list[str]:
    """The last parts of the names, where no other module ends on one of them; else the whole names."""
    leaves = {name.rpartition(".")[2] for name in names}
    matched = {name for name in layers.modules if name.rpartition(".")[2] in leaves}
    return sorted(leaves if matched == set(names) else names)


def _check_prefix(prefix: str, layers: Outline) -> None:
    end = layers.prefix.rpartition(".")[2]
    if prefix.rpartition(".")[2] != end:
        near = difflib.get_close_matches(prefix, PREFIXES, n=1, cutoff=0.0)[0]
        raise InputError(f"--prefix {prefix}: it ends where the layers' numbers begin, on {end}; did you mean {near}?")


def _split(factors: Factors, targets: list[str], config: Any) -> tuple[Factors, list[str], list[str]]:
    """The fused projections of Gated DeltaNet as three: A for each of them, B's rows cut where q, k and v end."""
    lines, split = [], {}
    fused = 0
    for name, (a, b) in factors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf != FUSED:
            split[name] = (a, b)
            continue
        fused += 1
        key = config.linear_num_key_heads * config.linear_key_head_dim
        value = config.linear_num_value_heads * config.linear_value_head_dim
        for part, rows in zip(SPLIT, b.split([key, key, value]), strict=True):
            split[f"{stem}.{part}"] = (a.clone(), rows)
    renamed: list[str] = []
    for target in targets:
        stem, _, leaf = target.rpartition(".")
        renamed += [f"{stem}.{part}".removeprefix(".") for part in SPLIT] if leaf == FUSED else [target]
    lines.append(f"{fused} fused {FUSED} split into {', '.join(SPLIT)}" if fused else f"no {FUSED}: the same as peft")
    risky = sum(name.endswith(UNSERVED) for name in factors)
    if risky:
        lines.append(
            f"{risky} layers are {' or '.join(UNSERVED)}, whose factors SGLang may drop without an error: compare "
            f"served log-probs before you trust it"
        )
    return split, sorted(renamed), lines


def _merged(trained: Trained, base: Snapshot, dtype: str | None, folder: Path) -> tuple[list[str], dict[str, Any]]:
    layers = outline(base.folder)
    factors = by_base_names(trained, base, layers)
    tied = bool(layers.config.tie_word_embeddings)
    done = merge.merge(base.folder, folder, factors, trained.scale, tied=tied, dtype=dtype)
    _companions(base.folder, folder, untied=done.untied, dtype=dtype)
    kinds = " and ".join(sorted(done.dtypes))
    share = done.unmoved / done.weights
    lines = [
        f"{done.layers} layers are W + {trained.scale:g} B A, summed in fp32, written as {kinds}",
        f"{share:.1%} of their weights did not move in the cast to {kinds}"
        + (": their change is smaller than one of its steps; a peft export keeps it" if share else ""),
    ]
    if done.untied:
        lines.append(
            "the head was tied to the embedding and has factors: it is written as a weight of its own, and "
            f"config.json says {TIE} = false"
        )
    return lines, {"rank": trained.config["r"], "dtype": kinds}


def _whole(trained: Trained, dtype: str | None, folder: Path) -> tuple[list[str], dict[str, Any]]:
    done = merge.merge(trained.folder, folder, {}, 1.0, tied=False, dtype=dtype)
    _companions(trained.folder, folder, untied=done.untied, dtype=dtype)
    return [f"whole weights, {f'cast to {dtype}' if dtype else 'as they were trained'}"], {
        "dtype": dtype or "as trained"
    }


def _companions(base: Path, folder: Path, *, untied: bool, dtype: str | None) -> None:
    """The files that stand beside the weights, with a configuration that suits them."""
    for path in base.iterdir():
        name = path.name
        if name in (INFO, merge.INDEX) or name.startswith("."):
            continue
        if path.is_file() and (path.suffix in COMPANIONS or name.startswith(("LICENSE", "NOTICE"))):
            shutil.copyfile(path, folder / name)
    config = json.loads((base / "config.json").read_text())
    for table in (config, *(value for value in config.values() if isinstance(value, dict))):
        if untied and (table is config or table is config.get("text_config")):
            table[TIE] = False
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and key in table:
                table[key] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _base_name(source: str) -> Mapping[str, str]:
    """How PEFT names a base model: one on the hub by its name and revision."""
    match = _HUB.fullmatch(source)
    return {"base_model_name_or_path": match[1], "revision": match[2]} if match else {"base_model_name_or_path": source}
