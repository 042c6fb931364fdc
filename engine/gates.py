"""`[[gate]]`: rules that end a run which goes nowhere."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence

from engine.errors import RunError
from engine.recipe import Gate

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class GateClosed(RunError):
    """A gate's rule holds; its text says which, with the figures."""


def check_gates(gates: Sequence[Gate], history: Sequence[Mapping[str, float]]) -> None:
    """Raise GateClosed when a gate's metric, averaged over its window of the newest steps, meets its `stop_if`.

    Raises RunError for a metric that the steps do not have, naming those they have.
    """
    for gate in gates:
        if gate.metric not in history[-1]:
            raise RunError(f"gate.metric = {gate.metric!r} is no metric; known: {', '.join(sorted(history[-1]))}")
        if len(history) < gate.after:
            continue
        values = [step[gate.metric] for step in history[-gate.window :]]
        mean = sum(values) / len(values)
        sign, bound = re.fullmatch(r"\s*(<=|>=|<|>)\s*(\S+)\s*", gate.stop_if).groups()  # type: ignore[union-attr]
        if _COMPARE[sign](mean, float(bound)):
            raise GateClosed(
                f"gate: {gate.metric} averages {mean:.4g} over the last {len(values)} steps, "
                f"and the recipe stops the run if it is {sign} {bound}"
            )
