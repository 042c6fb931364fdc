"""Which way the arrows run, and what works in a Python without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

STAGES = ("tasks", "rollout", "reward", "train", "sync", "evaluate", "record", "plan")


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    return names | {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage(stage: str) -> None:
    for path in Path("engine", stage).rglob("*.py"):
        others = {n for n in imported(path) for s in STAGES if s != stage and f"{n}.".startswith(f"engine.{s}.")}
        assert not others, f"{path} imports {others}"


@pytest.mark.parametrize("package", ["kernels", "sandbox"])
def test_kernels_and_sandbox_import_nothing_of_the_engine(package: str) -> None:
    for path in Path(package).rglob("*.py"):
        assert not [n for n in imported(path) if n.split(".")[0] == "engine"], path


@pytest.mark.parametrize(
    "module",
    [
        "sandbox",
        "engine.recipe",
        "engine.recipe_file",
        "engine.types",
        "engine.cli",
        "engine.preflight",
        "engine.reward",
        "engine.tasks",
        "engine.start",
        "engine.record",
        "engine.plan",
    ],
)
def test_imports_without_torch(module: str) -> None:
    hide = "import sys; sys.modules.update(torch=None, transformers=None, vllm=None)"
    done = subprocess.run([sys.executable, "-c", f"{hide}; import {module}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ray_is_imported_by_the_cluster_alone() -> None:
    for path in (path for package in ("engine", "kernels", "sandbox") for path in Path(package).rglob("*.py")):
        of_ray = {name for name in imported(path) if name.split(".")[0] == "ray"}
        assert not of_ray or path.is_relative_to("engine/cluster"), f"{path} imports {of_ray}"


def test_a_stage_knows_nothing_of_the_cluster() -> None:
    for path in (path for stage in STAGES for path in Path("engine", stage).rglob("*.py")):
        assert not [name for name in imported(path) if f"{name}.".startswith("engine.cluster.")], path
