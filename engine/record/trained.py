"""What was trained, read back from disk and checked against the base model that it belongs to."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.errors import InputError
from engine.snapshot import Snapshot, cached_folder, hash_folder, resolve
from engine.types import Factors

if TYPE_CHECKING:
    import torch

CONFIG, TENSORS, INFO = "adapter_config.json", "adapter_model.safetensors", "training_info.json"
KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
BASE_COPY = ".base_layer."
"""In the names of a base model's weights that PEFT puts beside an adapter of an embedding or a head."""
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
}
"""What a plain LoRA says of itself; anything else would be computed wrongly here."""
LAYER = re.compile(r"(.+?)\.\d+\..+")


@dataclass(frozen=True, slots=True)
class Trained:
    """An adapter, or whole weights where `factors` is None."""

    folder: Path
    info: Mapping[str, Any]
    """training_info.json: base_model, base_model_sha256, step."""
    config: Mapping[str, Any]
    """adapter_config.json, as PEFT spells it; empty for whole weights."""
    factors: Factors | None
    """By the layer's name as the file has it."""
    recipe: Path | None
    """The run's, where it is a run's."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        rank, alpha = self.config["r"], self.config["lora_alpha"]
        return float(alpha / (rank**0.5 if self.config.get("use_rslora") else rank))


@dataclass(frozen=True, slots=True)
class Outline:
    """A base model's layers, known from its configuration alone."""

    config: Any
    """transformers' configuration of the causal language model."""
    modules: tuple[str, ...]
    linear: Mapping[str, tuple[int, int]]
    """(out, in) of every linear layer."""

    @property
    def prefix(self) -> str:
        """Where its decoder layers stand, such as `model.layers`."""
        return next(found for name in self.linear if (found := layers_prefix(name)))


def find(run: Path, step: int | None) -> tuple[Path, Path | None]:
    """The folder of what `run`, a run's folder or an adapter's, holds at `step` (None: at its end), and the recipe.

    Raises InputError, which lists the steps that there are, where it holds none.
    """
    if not run.is_dir():
        raise InputError(f"{run}: no such folder; name a run's folder or an adapter's")
    if any((run / name).is_file() for name in (CONFIG, TENSORS)) or _is_model(run):
        if step is not None:
            raise InputError(f"--step {step}: {run} is one adapter or model; a step goes with a run's folder")
        return run, None
    recipe = run / "recipe.toml"
    end = next((run / name for name in ("adapter", "model") if (run / name).is_dir()), None)
    steps = {
        _step(path.parent): path for name in ("adapter", "model") for path in run.glob(f"checkpoints/step-*/{name}")
    }
    steps.pop(None, None)  # set aside, or still being written
    if end is not None and (last := _info(end).get("step")) is not None:
        steps[last] = end
    chosen = end if step is None else steps.get(step)
    if chosen is not None:
        return chosen, recipe if recipe.is_file() else None
    there = ", ".join(map(str, sorted(s for s in steps if s is not None)))
    if step is None and not steps:
        raise InputError(f"{run}: neither a run with an adapter/, a model/ or checkpoints/ nor an adapter's folder")
    what = "this run is not finished, name one of its steps" if step is None else f"--step {step}: no such step"
    raise InputError(f"{run}: {what}; there are: {there or 'none'}")


def read(run: Path, step: int | None) -> Trained:
    """Read what `run` holds at `step`; see `find`. Raises InputError for what is missing, torn or no plain LoRA."""
    folder, recipe = find(run, step)
    info = _json(folder / INFO)
    for key in ("base_model", "base_model_sha256", "step"):
        if key not in info:
            raise InputError(f"{folder / INFO}: {key} is missing; it says which base model this belongs to")
    if _is_model(folder):
        return Trained(folder, info, {}, None, recipe)
    config = _json(folder / CONFIG)
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float):
            raise InputError(f"{folder / CONFIG}: {key} = {config.get(key)!r}: a number is needed")
    for key, plain in PLAIN.items():
        if key in config and config[key] not in plain:
            raise InputError(f"{folder / CONFIG}: {key} = {config[key]!r}: only plain LoRA is known here")
    factors = _factors(folder / TENSORS)
    _check_rank(folder, factors, config["r"], info.get("rank", config["r"]))
    return Trained(folder, info, config, factors, recipe)


def base_of(trained: Trained, source: str | None, *, any_base: bool) -> Snapshot:
    """The base model: `source` where it is given, else what training_info.json names.

    Raises InputError where it can't be had, or is another one than was trained on and `any_base` is not set.
    """
    name, wanted = trained.info["base_model"], trained.info["base_model_sha256"]
    chosen = source or str(name)
    folder = cached_folder(chosen)
    if folder is not None and (folder / "config.json").is_file():
        snapshot = Snapshot(chosen, folder, hash_folder(folder))
    else:
        try:
            snapshot = resolve(chosen, _wheel_sha256(trained.recipe, chosen))
        except InputError as error:
            raise InputError(
                f"the base model of {trained.folder}: {error}; --model SOURCE names another place of it"
            ) from None
    if snapshot.sha256 != wanted and not any_base:
        raise InputError(
            f"{trained.folder} was trained on {name} with sha256 {str(wanted)[:12]}; {chosen} has "
            f"{snapshot.sha256[:12]}, so it is another model, or files in its folder have changed; --model SOURCE "
            f"names the right one, --any-base takes it as it is"
        )
    return snapshot


def outline(folder: Path) -> Outline:
    """The layers of the model in `folder`; no weight is loaded."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    linear = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    return Outline(model.config, tuple(name for name, _ in model.named_modules() if name), linear)


def by_base_names(trained: Trained, base: Snapshot, layers: Outline) -> Factors:
    """The factors by the base's own names, whatever prefix the file has.

    Raises InputError, with names, for layers that the base lacks or has in another shape.
    """
    assert trained.factors is not None
    named = with_prefix(trained.factors, layers.prefix)
    if any(name.endswith((".in_proj_q", ".in_proj_k", ".in_proj_v")) for name in named):
        raise InputError(f"{trained.folder} has SGLang's split layers; name the run or its peft export instead")
    wrong = []
    for name, (a, b) in named.items():
        have, need = (b.shape[0], a.shape[1]), layers.linear.get(name)
        if need != have:
            what = "no such linear layer" if need is None else f"{need[0]} x {need[1]}"
            wrong.append(f"{name} is {have[0]} x {have[1]} in the adapter, {what} in the base")
    if wrong:
        raise InputError(
            f"{trained.folder} is no adapter of {base.source}: {len(wrong)} of its {len(named)} layers do not match, "
            f"such as {wrong[0]}"
        )
    return named


def layers_prefix(name: str) -> str | None:
    """What stands before the number in a decoder layer's name; None for a layer outside of them, such as the head."""
    found = LAYER.fullmatch(name)
    return found[1] if found else None


def with_prefix(factors: Factors, prefix: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The factors with `prefix` in the place of what stands before the layers' numbers."""
    return {
        name if (old := layers_prefix(name)) is None else prefix + name.removeprefix(old): pair
        for name, pair in factors.items()
    }


def _is_model(folder: Path) -> bool:
    return (folder / INFO).is_file() and (folder / "config.json").is_file()


def _step(checkpoint: Path) -> int | None:
    found = re.fullmatch(r"step-(\d+)", checkpoint.name)
    return int(found[1]) if found else None


def _info(folder: Path) -> dict[str, Any]:
    return _json(folder / INFO) if (folder / INFO).is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        there = ", ".join(sorted(p.name for p in path.parent.iterdir())) or "nothing"
        raise InputError(f"{path}: it is missing; the folder holds {there}") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: no valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: a JSON object is expected, not {type(table).__name__}")
    return table


def _factors(path: Path) -> Factors:
    """Raises InputError for a missing or torn file, a tensor that is no factor, or half a pair."""
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in path.parent.iterdir())) or "nothing"
        raise InputError(f"{path}: it is missing; the folder holds {there}")
    halves: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                if BASE_COPY in key:
                    continue  # the base has it
                match = KEY.fullmatch(key)
                if match is None:
                    raise InputError(f"{path}: {key} is no factor of a linear layer")
                halves.setdefault(match[1], {})[match[2]] = file.get_tensor(key).float()
    except SafetensorError as error:
        raise InputError(f"{path}: can't be read, it may be torn: {error}") from None
    single = [name for name, pair in halves.items() if len(pair) != 2]
    if single or not halves:
        raise InputError(f"{path}: " + (f"only one factor of {single[0]}" if single else "it holds no factor"))
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}


def _check_rank(folder: Path, factors: Factors, rank: int, noted: int) -> None:
    if rank != noted:
        raise InputError(f"{folder}: {CONFIG} says rank {rank}, {INFO} says {noted}; they belong to different adapters")
    for name, (a, b) in factors.items():
        if (a.ndim, b.ndim, a.shape[0], b.shape[-1]) != (2, 2, rank, rank):
            raise InputError(
                f"{folder}: {name} has factors {tuple(a.shape)} and {tuple(b.shape)}, {CONFIG} says rank {rank}"
            )


def _wheel_sha256(recipe: Path | None, source: str) -> str:
    """Of a pypi source, from the run's recipe."""
    if recipe is None:
        return ""
    model = tomllib.loads(recipe.read_text()).get("model", {})
    return str(model.get("sha256", "")) if model.get("source") == source else ""
