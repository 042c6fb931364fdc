from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from engine.cli import commands
from engine.record.listing import Listed, list_runs
from engine.record.lock import lock_folder


def run(root: Path, name: str, rewards: list[float], heldout: tuple[float, float] | None = None) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "recipe.toml").touch()
    lines = [json.dumps({"step": i, "reward/mean": r, "pass_rate": r / 2}) for i, r in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"half')
    if heldout:
        suite = {"before": heldout[0], "after": heldout[1]}
        (folder / "summary.json").write_text(json.dumps({"heldout": suite}))
    return folder


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    run(tmp_path, "a", [0.1, 0.5], (0.2, 0.6))
    run(tmp_path, "b", [])
    (tmp_path / "notes").mkdir()
    with lock_folder(run(tmp_path, "c", [0.25])):
        assert list_runs(tmp_path) == [
            Listed("a", "ended", 2, 0.5, 0.25, (0.2, 0.6)),
            Listed("b", "stopped", 0, None, None, None),
            Listed("c", "running", 1, 0.25, 0.125, None),
        ]
    assert list_runs(tmp_path)[2].state == "stopped"
    said = CliRunner().invoke(commands, ["ls", str(tmp_path)]).output
    assert [line.split()[:3] for line in said.splitlines()[1:]] == [
        ["a", "ended", "2"],
        ["b", "stopped", "0"],
        ["c", "stopped", "1"],
    ]
    assert "0.200 -> 0.600" in said


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    assert "no run" in CliRunner().invoke(commands, ["ls", str(tmp_path)]).output
