"""Where a run's samplers and graders are: processes of this machine, or actors on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.recipe import Recipe
from engine.reward import Grader
from engine.rollout import Samplers, children
from engine.rollout.messages import SamplerConfig
from engine.snapshot import Snapshot
from engine.sync import open_transport
from engine.train.policy import trained_names
from engine.types import CPU_SEQUENCES, GPU_SEQUENCES

if TYPE_CHECKING:
    from engine.cluster.graders import Graders
    from engine.cluster.tensors import ClusterTensors
    from engine.sync import CollectiveTensors, SharedTensors


def open_samplers(
    recipe: Recipe, snapshot: Snapshot, folder: Path, cores: int, say: Callable[[str], object] = lambda line: None
) -> Samplers:
    """As many samplers as the recipe wants, each with a log in `folder`; `cores` of this machine are shared out."""
    configs = [sampler_config(recipe, snapshot, devices) for devices in recipe.samplers]
    logs = [folder / f"sampler{f'-{i}' if len(configs) > 1 else ''}.log" for i in range(len(configs))]
    if recipe.cluster is None:
        threads = recipe.rollout.threads or max(1, cores // len(recipe.rollout.devices))
        return Samplers(configs, children(configs, threads=threads, logs=logs), say=say)
    from engine.cluster.samplers import actors

    threads = recipe.rollout.threads or recipe.cluster.sampler_cpus
    return Samplers(configs, actors(recipe, threads=threads, logs=logs), say=say)


def open_grader(recipe: Recipe, say: Callable[[str], object]) -> Grader | Graders:
    """What judges completions."""
    if recipe.cluster is None:
        return Grader(recipe.sandbox, recipe.reward)
    from engine.cluster.graders import Graders

    return Graders(recipe.cluster, recipe.sandbox, recipe.reward, say)


def open_tensors(recipe: Recipe, shapes: Any, scale: float) -> SharedTensors | CollectiveTensors | ClusterTensors:
    """The trainer's side of what carries its tensors to the samplers."""
    dtype = recipe.model.dtype if recipe.full else "float32"
    if recipe.cluster is None:
        return open_transport(recipe.sync.transport, shapes, scale, dtype, recipe.train.device)
    from engine.cluster.tensors import ClusterTensors

    return ClusterTensors(shapes, scale, dtype)


def sampler_config(recipe: Recipe, snapshot: Snapshot, devices: tuple[str, ...]) -> SamplerConfig:
    """What a sampler on `devices` needs for the recipe."""
    rollout, lora = recipe.rollout, recipe.lora
    on_cpu = devices[0] == "cpu"
    adapter = lora if recipe.sync.install == "adapter" else None
    return SamplerConfig(
        model_dir=str(snapshot.folder),
        dtype=rollout.dtype,
        device="cpu" if on_cpu else "cuda:" + ",".join(device.rpartition(":")[2] for device in devices),
        max_model_len=rollout.max_prompt_tokens + rollout.max_tokens,
        max_sequences=CPU_SEQUENCES if on_cpu else GPU_SEQUENCES,
        kv_cache_mb=rollout.kv_cache_mb,
        gpu_memory_fraction=rollout.gpu_memory_fraction,
        seed=recipe.run.seed,
        install=recipe.sync.install,
        lora_rank=adapter.rank if adapter else 0,
        lora_targets=_leaves(trained_names(snapshot.folder, adapter)) if adapter else (),
        engine=rollout.engine if rollout.engine != "auto" else "step" if on_cpu else "async",
        tensor_parallel=len(devices),
    )


def _leaves(names: list[str]) -> tuple[str, ...]:
    """The last parts of layers' names, each once."""
    return tuple(sorted({name.rpartition(".")[2] for name in names}))
