"""`rlvr show`: a step's completions in the terminal."""

from __future__ import annotations

import gzip
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import rich.console
from rich.markup import escape

from engine.errors import InputError

COLOURS = {"AC": "green", "WA": "yellow", "INFRA": "magenta"}


class ShowError(InputError):
    """There is nothing of that name to show; the text says what there is."""


def show(run: Path, step: int | None) -> None:
    """Print prompts, completions, verdicts, rewards and advantages of a step, the newest one if None."""
    names = sorted(path.name.removesuffix(".jsonl.gz") for path in (run / "rollouts").glob("*.jsonl.gz"))
    steps = [name for name in names if name.startswith("step-")]
    if not steps:
        raise ShowError(f"{run}: no run with rollouts is there")
    wanted = steps[-1] if step is None else f"step-{step:06d}"
    if wanted not in names:
        raise ShowError(f"{run} has no step {step}; it has {int(steps[0][5:])} to {int(steps[-1][5:])}")
    with gzip.open(run / "rollouts" / f"{wanted}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    console = rich.console.Console(highlight=False)
    console.print(f"[bold]{run.name} {wanted}[/bold]: {len(rows)} completions")
    for _, members in groupby(rows, key=lambda row: row["group"]):
        _show_group(console, list(members))


def _show_group(console: rich.console.Console, members: list[dict[str, Any]]) -> None:
    first = members[0]
    rewards = [m["reward"] for m in members if m["reward"] is not None]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    console.print(f"\n[bold]{escape(first['task'])}[/bold] ({escape(first['source'])}), mean reward {mean:.3f}")
    console.print(escape(_prompt_text(first["prompt"])), style="dim", soft_wrap=True)
    for m in members:
        colour = COLOURS.get(m["verdict"], "red")
        reward = "masked" if m["reward"] is None else f"{m['reward']:.3f}"
        console.print(
            f"  [{colour}]{m['verdict']:>7}[/{colour}] {m['passed']}/{m['total']} reward {reward} "
            f"advantage {m['advantage']:+.3f} v{m['version']} {len(m['token_ids'])} tokens ({m['finish']}) "
            f"| {escape(repr(m['completion']))}",
            soft_wrap=True,
        )
        if m["verdict"] != "AC" and m["detail"]:
            console.print(f"          {escape(m['detail'].splitlines()[0])}", style="dim", soft_wrap=True)


def _prompt_text(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
