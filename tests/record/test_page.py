"""The page of a run: what it holds, and what a browser makes of it."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.record.page import collect, write_page

EVIL = '</script><img src=x onerror="document.title=1">'
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps of two groups of two, written by hand as a run writes them."""
    (tmp_path / "rollouts").mkdir()
    with (tmp_path / "metrics.jsonl").open("w") as metrics:
        for step in range(1, 5):
            values = {"step": step, "reward/mean": step / 4, "pass_rate": 0.5, "grad_norm": float("nan")}
            metrics.write(json.dumps(values) + "\n")
            with gzip.open(tmp_path / "rollouts" / f"step-{step:06d}.jsonl.gz", "wt") as file:
                for group in range(2):
                    for member in range(2):
                        file.write(json.dumps(rollout(step, group, member)) + "\n")
        metrics.write('{"step": 5, "rew')  # a run that goes on
    return tmp_path


def rollout(step: int, group: int, member: int) -> dict[str, object]:
    right = member == 1 and step > 2
    return {
        "task": f"task-{group}", "source": "easy", "group": 10 * step + group, "member": member, "prompt": "Add.",
        "completion": EVIL if member == 0 else f"print({step})", "token_ids": [1, 2, 3], "finish": "stop", "version": 0,
        "boundaries": [[1, 2]], "logprob": {"mean": -0.5, "min": -1.0}, "program": "print(1)",
        "verdict": "AC" if right else "INFRA" if member == 0 and group == 1 else "WA", "passed": int(right),
        "total": 1, "detail": "", "soft": False, "reward": None if member == 0 and group == 1 else float(right),
        "parts": {"passed": float(right)}, "advantage": 0.5, "trained": True,
    }  # fmt: skip


def test_the_page_holds_curves_tasks_and_rollouts(run: Path) -> None:
    data = collect(run, 1000)
    assert data["steps"] == [1, 2, 3, 4]
    assert data["metrics"]["grad_norm"] == [None] * 4
    assert data["completions"] == {"shown": 16, "all": 16}
    assert data["tasks"] == [
        {"task": "task-0", "source": "easy", "attempts": 8, "reward": 0.25, "first": 0.0, "second": 0.5},
        {"task": "task-1", "source": "easy", "attempts": 8, "reward": 0.5, "first": 0.0, "second": 1.0},
    ]


@pytest.mark.parametrize(("most", "steps"), [(1, [4]), (8, [1, 4]), (12, [1, 3, 4]), (1000, [1, 2, 3, 4])])
def test_a_long_run_shows_steps_spread_over_it(run: Path, most: int, steps: list[int]) -> None:
    assert sorted({group["step"] for group in collect(run, most)["groups"]}) == steps


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run is there"):
        write_page(tmp_path, None)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InputError, match="no step yet"):
        write_page(tmp_path, None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium runs the page in a browser")
def test_a_browser_shows_it_and_runs_nothing_that_a_model_wrote(run: Path, tmp_path: Path) -> None:
    page = write_page(run, None)
    whole = dom(page, tmp_path)
    assert f"<title>{run.name} – rlvr</title>" in whole
    assert whole.count('class="box member"') == 16
    assert len(re.findall(r"<svg", whole)) == 2  # grad_norm has no finite value, the others are main curves
    assert "no finite value" in whole
    assert "<img" not in whole.partition("<script")[0]
    assert "masked" in whole
    shown = dom(page, tmp_path, "#step=3&verdict=AC")
    assert shown.count('class="box member"') == 2
    assert "2 groups, page 1 of 1" in shown
    assert dom(page, tmp_path, "#says=onerror&low=0&task=task-0").count('class="box member"') == 4
    assert dom(page, tmp_path, "#task=nothing").count('class="box member"') == 0


def dom(page: Path, scratch: Path, address: str = "") -> str:
    """The page's document after its script has run, without a network."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000",
        "--proxy-server=127.0.0.1:9", f"--user-data-dir={scratch / 'browser'}", "--dump-dom", page.as_uri() + address,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
