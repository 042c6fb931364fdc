"""`rlvr run --dry-run`: what a run would be, without a GPU, a model's weights or a download."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from engine import recipe_file
from engine.errors import InputError
from engine.preflight import preflight
from engine.recipe import Recipe
from engine.snapshot import cached_folder, check_source, config_folder, movable
from engine.tasks import load_tasks
from engine.tasks.sources import parse_sources, to_download

GIB = 2**30


def lines(recipe: Recipe) -> Iterator[str]:
    """The plan, line by line, then the whole recipe as TOML.

    What this machine lacks for the run is said and does not end it. Raises InputError for what no machine could run.
    """
    check_source(recipe.model.source, recipe.model.sha256)
    yield from _tokens(recipe)
    yield from _downloads(recipe)
    yield from memory_lines(recipe)
    for check in preflight(recipe):
        yield f"{'ok  ' if check.ok else 'not '} {check.name}: {check.detail}"
    yield ""
    yield recipe_file.dump(recipe)


def _tokens(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    completions = rollout.prompts_per_step * rollout.group_size
    sampled = completions * rollout.max_tokens
    again = f"; up to {1 + rollout.refill} times, to replace groups without a signal" if rollout.refill else ""
    yield (
        f"step {rollout.prompts_per_step} prompts x {rollout.group_size} = {completions} completions, at most "
        f"{sampled:,} sampled tokens after prompts of at most {rollout.max_prompt_tokens}{again}"
    )
    yield f"run  {recipe.run.steps} steps, {recipe.run.steps * completions:,} completions"


def _downloads(recipe: Recipe) -> Iterator[str]:
    source = recipe.model.source
    if cached_folder(source) is None:
        yield f"get  model {source}, unless the hub's cache has it"
    if movable(source):
        yield f"note model.source = {source}: a branch or a tag may move; 40 hex digits can't"
    sets = {"tasks.train": recipe.tasks.train} | {f"tasks.heldout.{k}": v for k, v in recipe.tasks.heldout.items()}
    for key, text in sets.items():
        needed = to_download(text)
        missing = [s.name for s in parse_sources(text) if s.kind == "file" and not Path(s.name).exists()]
        for what in needed:
            yield f"get  {key}: {what}"
        for name in missing:
            yield f"make {key}: {name} is not there yet; rlvr tasks gold and rlvr tasks split make such files"
        if not needed and not missing:
            yield f"ok   {key}: {len(load_tasks(text)):,} tasks"


def memory_lines(recipe: Recipe) -> Iterator[str]:
    """What trainer and samplers need on their devices, from the model's config.json; a note where it can't be had."""
    if importlib.util.find_spec("torch") is None:
        yield "note no memory plan: it needs torch, which is not installed"
        return
    try:
        folder = config_folder(recipe.model.source)
    except InputError as error:
        yield f"note no memory plan: {error}"
        return
    import torch
    from transformers import AutoConfig

    from engine.train.memory import planned
    from engine.train.step import loss_spec

    how = recipe.full or recipe.lora
    assert how is not None  # a recipe has one of the two
    try:
        loss_spec(recipe)
        step = planned(folder, dtype=recipe.model.dtype, how=how, checkpointing=recipe.train.checkpointing)
    except (ValueError, LookupError) as error:
        raise InputError(str(error)) from None
    budget = recipe.train.token_budget
    peak = step.peak_of(budget, budget)
    standing = step.weights + step.gradients + step.moments
    yield (
        f"plan trainer on {recipe.train.device}: {peak / GIB:.2f} GiB at a micro-batch of {budget} tokens, "
        f"{standing / GIB:.2f} of it weights, gradients and moments"
    )
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    width = torch.finfo(getattr(torch, recipe.rollout.dtype)).bits // 8
    own = step.gradients if recipe.lora else 0  # fp32 like the adapter's factors, which are no part of the base
    weights = (step.weights - own) * width * 8 // torch.finfo(getattr(torch, recipe.model.dtype)).bits
    token = kv_bytes(config, width)
    rollout = recipe.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    batch = rollout.prompts_per_step * rollout.group_size / len(recipe.samplers)
    room = (
        f"{rollout.kv_cache_mb / 1024:.2f} GiB are given"
        if all(device == "cpu" for device in rollout.devices)
        else f"rollout.gpu_memory_fraction = {rollout.gpu_memory_fraction} of the device is given to both"
    )
    full = f"{token * longest * batch / GIB:.2f} GiB for {batch:.0f} completions of the full {longest} tokens"
    for devices, count in Counter(recipe.samplers).items():
        each = f"{count} samplers, each" if count > 1 else "sampler"
        yield (
            f"plan {each} on {' + '.join(devices)}: weights {weights / GIB:.2f} GiB, KV {token / 1024:.1f} KiB a "
            f"token: {full}; {room}"
        )


def kv_bytes(config: object, width: int) -> int:
    """Bytes of keys and values that a token adds, over the layers with attention; recurrent ones have none."""
    heads = config.num_attention_heads  # type: ignore[attr-defined]
    size = getattr(config, "head_dim", None) or config.hidden_size // heads  # type: ignore[attr-defined]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers  # type: ignore[attr-defined]
    layers = sum(kind != "linear_attention" for kind in kinds)
    return int(2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * size * width)
