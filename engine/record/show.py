"""`rlvr show`: a step's completions in the terminal."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import rich.console
from rich.columns import Columns
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from engine.errors import InputError
from engine.snapshot import cached_folder

COLOURS = {"AC": "green", "WA": "yellow", "INFRA": "magenta"}
WIDTH = 48
"""Of a completion that stands beside others."""
STRONG_GAP = 0.5
"""Nats from which on a token is coloured strongly."""


class ShowError(InputError):
    """There is nothing of that name to show; the text says what there is."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which completions are shown."""

    task: str = ""
    """Part of the task's name."""
    verdict: str | None = None
    low: float | None = None
    high: float | None = None
    """Bounds of the reward; a masked one is outside of any."""

    def fits(self, row: dict[str, Any]) -> bool:
        """Whether a completion is wanted."""
        reward, bounded = row["reward"], self.low is not None or self.high is not None
        return (
            self.task in row["task"]
            and self.verdict in (None, row["verdict"])
            and not (bounded and reward is None)
            and (self.low is None or reward >= self.low)
            and (self.high is None or reward <= self.high)
        )


def reward_range(text: str) -> tuple[float | None, float | None]:
    """LOW:HIGH as two numbers, None for one that is left out. Raises ShowError for anything else."""
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return (float(low) if low else None, float(high) if high else None)
    except ValueError:
        raise ShowError(f"--reward {text}: write it as LOW:HIGH, such as 0.5:1 or :0") from None


def show(run: Path, step: int | None, wanted: Wanted | None = None, *, side_by_side: bool = False) -> None:
    """Print prompts, completions, verdicts, rewards and advantages of a step, the newest one if None."""
    wanted = wanted or Wanted()
    names = sorted(path.name.removesuffix(".jsonl.gz") for path in (run / "rollouts").glob("*.jsonl.gz"))
    steps = [name for name in names if name.startswith("step-")]
    if not steps:
        raise ShowError(f"{run}: no run with rollouts is there")
    chosen = steps[-1] if step is None else f"step-{step:06d}"
    if chosen not in names:
        raise ShowError(f"{run} has no step {step}; it has {int(steps[0][5:])} to {int(steps[-1][5:])}")
    with gzip.open(run / "rollouts" / f"{chosen}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    console = rich.console.Console(highlight=False)
    found = [row for row in rows if wanted.fits(row)]
    shown = f"{len(rows)} completions" if len(found) == len(rows) else f"{len(found)} of {len(rows)} completions"
    console.print(f"[bold]{run.name} {chosen}[/bold]: {shown}")
    tokenizer = _tokenizer(run) if any(row.get("gaps") for row in found) else None
    for _, members in groupby(found, key=lambda row: row["group"]):
        _show_group(console, list(members), tokenizer, side_by_side)


def _show_group(
    console: rich.console.Console, members: list[dict[str, Any]], tokenizer: Any, side_by_side: bool
) -> None:
    first = members[0]
    rewards = [m["reward"] for m in members if m["reward"] is not None]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    console.print(f"\n[bold]{escape(first['task'])}[/bold] ({escape(first['source'])}), mean reward {mean:.3f}")
    console.print(escape(_prompt_text(first["prompt"])), style="dim", soft_wrap=True)
    if side_by_side:
        panels = [
            Panel(_completion(m, tokenizer), title=_facts(m), subtitle=escape(_detail(m)[:WIDTH]), width=WIDTH)
            for m in members
        ]
        console.print(Columns(panels))
        return
    for m in members:
        line = Text("  ").append_text(Text.from_markup(_facts(m)))
        line.append(f" v{m['version']} {len(m['token_ids'])} tokens ({m['finish']}) | ")
        text = _completion(m, tokenizer)
        console.print(line.append_text(text if text.spans else Text(repr(m["completion"]))), soft_wrap=True)
        if _detail(m):
            console.print(f"          {escape(_detail(m))}", style="dim", soft_wrap=True)


def _facts(m: dict[str, Any]) -> str:
    colour = COLOURS.get(m["verdict"], "red")
    reward = "masked" if m["reward"] is None else f"{m['reward']:.3f}"
    return (
        f"[{colour}]{m['verdict']:>7}[/{colour}] {m['passed']}/{m['total']} reward {reward} "
        f"advantage {m['advantage']:+.3f}"
    )


def _detail(m: dict[str, Any]) -> str:
    return str(m["detail"].splitlines()[0]) if m["verdict"] != "AC" and m["detail"] else ""


def _completion(m: dict[str, Any], tokenizer: Any) -> Text:
    """The completion, its tokens coloured by how much less (red) or more (blue) likely the trainer finds them."""
    gaps = dict(m.get("gaps") or ())
    if not gaps or tokenizer is None:
        return Text(m["completion"])
    text = Text()
    for index, piece in enumerate(_pieces(tokenizer, m["token_ids"])):
        gap = gaps.get(index, 0.0)
        strength = "bold " if abs(gap) >= STRONG_GAP else ""
        text.append(piece, f"{strength}{'red' if gap < 0 else 'blue'}" if gap else "")
    return text


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [tokenizer.convert_tokens_to_string([token]) for token in tokenizer.convert_ids_to_tokens(list(ids))]


def _tokenizer(run: Path) -> Any:
    """The run's model's, if the model is still on this machine."""
    source = json.loads((run / "manifest.json").read_text())["model"]["source"]
    folder = cached_folder(source)
    if folder is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _prompt_text(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
