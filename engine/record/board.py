"""TensorBoard: scalars, histograms, a few rollouts as text, the recipe."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.types import Graded, Sampled

TEXT_EVERY = 5
"""Steps between two pages of rollouts."""
MOST_CHARACTERS = 4000
"""Of a completion on such a page."""


class Board:
    """Writes below `folder`; on a disk that is full it raises OSError like any file."""

    def __init__(self, folder: Path, recipe: str, purge_step: int) -> None:
        """recipe: as TOML. purge_step: the first step of this run; what stands there from an earlier one is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _say_once
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)
        self._writer.add_text("recipe", _code(recipe), purge_step - 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A step's metrics, by their names."""
        for name, value in values.items():
            self._writer.add_scalar(name if "/" in name else f"train/{name}", value, step)
        self._writer.flush()

    def rollouts(self, step: int, sampled: Sampled) -> None:
        """Lengths and rewards of all completions of a step, and now and then the best and the worst of a group."""
        graded = [item for group in sampled.groups for item in group]
        rewards = [item.reward for item in graded if item.reward is not None]
        self._writer.add_histogram("completions/length", _array([len(i.completion.token_ids) for i in graded]), step)
        if rewards:
            self._writer.add_histogram("reward/all", _array(rewards), step)
        if step % TEXT_EVERY == 1:
            judged = [[i for i in group if i.reward is not None] for group in sampled.groups]
            widest = max(judged, key=_spread)
            if widest:
                ends = {"best": max(widest, key=_reward), "worst": min(widest, key=_reward)}
                for which, item in ends.items():
                    self._writer.add_text(f"rollouts/{which}", _page(item), step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _array(values: list[Any]) -> Any:
    import numpy as np

    return np.array(values, dtype=np.float64)


def _reward(item: Graded) -> float:
    return item.reward or 0.0


def _spread(group: list[Graded]) -> float:
    return max(map(_reward, group)) - min(map(_reward, group)) if group else -1.0


def _page(item: Graded) -> str:
    completion = item.completion
    head = (
        f"{completion.task_id}: {item.verdict.verdict}, reward {_reward(item):.3f}, {len(completion.token_ids)} tokens"
    )
    return f"{head}\n\n{_code(completion.text[:MOST_CHARACTERS])}\n\n{_code(item.verdict.detail)}"


def _code(text: str) -> str:
    """Markdown that shows the text as it stands, whatever a model wrote."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _say_once(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread raises what a full disk told it again at the next flush; its own traceback says no more."""
    if isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard"):
        return
    threading.__excepthook__(failure)
