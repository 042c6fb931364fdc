"""What a person sees of a run: one line a step, live on a terminal, plain elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import rich.console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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


class Console:
    """Prints a run's progress; a bar with the time left stands below the lines where there is a terminal."""

    def __init__(self, steps: int) -> None:
        self._console = rich.console.Console(highlight=False)
        self._width = len(str(steps))
        self._steps = steps
        self._headed = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("training", total=steps)

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(escape(text), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step."""
        if not self._headed:
            self._headed = True
            heads = [f"{head:>{_width(head)}}" for head, _, _ in COLUMNS]
            self._console.print(f"[bold]{'step':>{self._width + 5}} {' '.join(heads)}[/bold]", soft_wrap=True)
        cells = [f"{metrics[key]:>{_width(head)}{form}}" for head, key, form in COLUMNS]
        self._console.print(f"{step:>{self._width + 5}} {' '.join(cells)}", soft_wrap=True)
        self._progress.update(self._bar, completed=step)

    def short_batch(self, step: int, sampled: Sampled, wanted: int) -> None:
        """Say so where sampling came to its bound before the batch was full."""
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
        self._console.print(
            f"[bold]{name}[/bold]: {before:.3f} -> {after:.3f}, "
            f"gain {gain.mean:+.3f}, 95% interval [{gain.low:+.3f}, {gain.high:+.3f}]".replace(
                "95% interval [", "95% interval \\["
            ),
            soft_wrap=True,
        )


def _width(head: str) -> int:
    return max(len(head), 8 if head == "mismatch" else 6)
