"""What a person sees of a run: one line a step, live on a terminal, plain elsewhere; all of it in log.txt too."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

import rich.console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from engine.record.health import Health
from engine.types import Gain, Sampled, SuiteResult

COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("pass", "pass_rate", ".3f"),
    ("mixed", "groups/mixed_share", ".2f"),
    ("len", "completions/mean_length", ".1f"),
    ("mismatch", "mismatch/mean_abs_logprob", ".1e"),
    ("tok/s", "perf/tokens_per_second", ".0f"),
    ("sample", "time/sample", ".1f"),
    ("grade", "time/grade", ".1f"),
    ("train", "time/train", ".1f"),
    ("sync", "time/sync", ".2f"),
)
PHASES = ("sample", "grade", "train", "sync")
"""What the loop waits for; the line says for which of them the longest."""
_MARKUP = re.compile(r"(?<!\\)\[/?bold\]")


class Console:
    """Prints a run's progress; a bar with the time left stands below the lines where there is a terminal.

    Each line also goes to the run's log, with the time and a word that greps well: run, step, sandbox, health.
    """

    def __init__(self, steps: int, log: Path, *, quiet: bool = False) -> None:
        """quiet: print no steps, only warnings and what came out."""
        self._console = rich.console.Console(highlight=False)
        self._width = len(str(steps))
        self._quiet = quiet
        self._headed = False
        self._health = Health()
        self._log: IO[str] = log.open("a", encoding="utf-8")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("training", total=steps)

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        self._log.close()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._line("run", escape(text))

    def step(self, history: Sequence[Mapping[str, float]], sampled: Sampled, wanted: int) -> None:
        """The line of the newest step; a word where fewer than `wanted` groups were trained, and warnings."""
        step, metrics = len(history), history[-1]
        if not self._headed:
            self._headed = True
            heads = [f"{head:>{_width(head)}}" for head, _, _ in COLUMNS]
            head = f"{'step':>{self._width + 5}} {' '.join(heads)} slowest"
            self._line("step", f"[bold]{head}[/bold]", printed=not self._quiet)
        cells = [f"{metrics[key]:>{_width(head)}{form}}" for head, key, form in COLUMNS]
        slowest = max(PHASES, key=lambda phase: metrics[f"time/{phase}"])
        line = f"{step:>{self._width + 5}} {' '.join(cells)} {slowest}"
        self._line("step", line, printed=not self._quiet)
        self._progress.update(self._bar, completed=step)
        self._verdicts(step, sampled, metrics)
        self._short_batch(step, sampled, wanted)
        for line in self._health.look(history):
            self._line("health", escape(line))

    def _verdicts(self, step: int, sampled: Sampled, metrics: Mapping[str, float]) -> None:
        """For the log alone: how many of each verdict, and what had to be run again."""
        counts = collections.Counter(item.verdict.verdict for group in sampled.groups for item in group)
        said = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        retries = metrics["perf/sandbox_retries"]
        self._line("sandbox", f"step {step}: {counts.total()} judged: {said}; {retries:.0f} retries", printed=False)

    def _short_batch(self, step: int, sampled: Sampled, wanted: int) -> None:
        if len(sampled.trained) < wanted:
            self.say(
                f"step {step}: {len(sampled.trained)} of {wanted} groups have a signal after sampling "
                f"{len(sampled.groups)} in {sampled.rounds} rounds; trained on those"
            )

    def suite(self, result: SuiteResult, when: str) -> None:
        """A suite's pass rate."""
        parts = ", ".join(f"{source.rpartition('/')[2]} {rate:.2f}" for source, rate in result.by_source.items())
        self.say(
            f"{when}: {result.name} pass rate {result.pass_rate:.3f} over {len(result.by_problem)} tasks ({parts})"
        )

    def gain(self, name: str, before: float, after: float, gain: Gain) -> None:
        """Before, after and the interval between them."""
        interval = escape(f"[{gain.low:+.3f}, {gain.high:+.3f}]")
        rates = f"{before:.3f} -> {after:.3f}"
        self._line("run", f"[bold]{escape(name)}[/bold]: {rates}, gain {gain.mean:+.3f}, 95% interval {interval}")

    def _line(self, word: str, markup: str, *, printed: bool = True) -> None:
        if printed:
            self._console.print(markup, soft_wrap=True)
        text = _MARKUP.sub("", markup).replace("\\[", "[").strip()
        self._log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {word}: {text}\n")
        self._log.flush()


def _width(head: str) -> int:
    return max(len(head), 8 if head == "mismatch" else 6)
