"""However a run ends, no sampler and no jail outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
START_SECONDS = 240.0
GONE_SECONDS = 20.0


def heed_ctrl_c() -> None:
    """A shell starts its background jobs with SIGINT ignored, and this test run may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """A quickstart that has written its first step."""
    run = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "rlvr"), "run", str(ROOT / "recipes" / "quickstart.toml"),
            "--output", str(tmp_path / "run"), "--set", "tasks.heldout={}", "--set", "rollout.prompts_per_step=2",
            *options,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + START_SECONDS
    while not (metrics.exists() and metrics.read_text()):
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            pytest.fail(f"the run did not start: {run.communicate()}")
        time.sleep(0.2)
    return run


def below(ancestor: int) -> dict[int, str]:
    """The living descendants of a process: pid and command line."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
                lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    found: dict[int, str] = {}
    todo = [ancestor]
    while todo:
        parent = todo.pop()
        children = [pid for pid, of in parents.items() if of == parent]
        found |= {pid: lines[pid] for pid in children}
        todo += children
    return found


def alive(pids: dict[int, str]) -> dict[int, str]:
    out = {}
    for pid, line in pids.items():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            out[pid] = line
    return out


def kill_trainer(number: int) -> Callable[[int, dict[int, str]], None]:
    return lambda trainer, children: os.kill(trainer, number)


@pytest.mark.parametrize(
    ("strike", "code", "words"),
    [
        (kill_trainer(signal.SIGINT), 130, ["interrupted"]),
        (kill_trainer(signal.SIGKILL), -signal.SIGKILL, []),
    ],
    ids=["ctrl-c", "sigkill"],
)
def test_nothing_outlives_a_run(
    tmp_path: Path, strike: Callable[[int, dict[int, str]], None], code: int, words: list[str]
) -> None:
    run = started(tmp_path)
    children = below(run.pid)
    try:
        assert any("engine.rollout.worker" in line for line in children.values())
        assert any("nsjail" in line for line in children.values())
        strike(run.pid, children)
        _, errors = run.communicate(timeout=120)
    finally:
        run.kill()  # a run that did not end would stand in the way of every later test
    assert run.returncode == code, errors
    assert all(word in errors for word in words), errors
    assert "Traceback" not in errors
    deadline = time.monotonic() + GONE_SECONDS
    while (left := alive(children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_a_killed_sampler_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    run = started(tmp_path, "--max-steps", "3")
    try:
        sampler = next(pid for pid, line in below(run.pid).items() if "engine.rollout.worker" in line)
        os.kill(sampler, signal.SIGKILL)
        _, errors = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["perf/sampler_restarts"] == 1
    assert all(line["sync/canary"] < 1e-3 for line in lines)


def test_a_full_disk_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    target = tmp_path / "small"
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(target)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "rlvr"), "run", str(ROOT / "recipes" / "quickstart.toml"),
                "--output", str(target / "run"), "--set", "tasks.heldout={}", "--max-steps", "20",
                "--set", "rollout.prompts_per_step=2",
            ],
            capture_output=True, text=True, timeout=400, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", str(target)], check=True)
