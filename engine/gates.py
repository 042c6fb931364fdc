"""What ends a run between two steps: the rules of `[[gate]]`, and trainer and sampler that disagree."""

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


def check_mismatch(limit: float, step: int, metrics: Mapping[str, float]) -> None:
    """Raise RunError where trainer and sampler differ by more than `limit` nats on average; a limit of 0 is none."""
    mean = metrics["mismatch/mean_abs_logprob"]
    if limit == 0 or mean <= limit:  # written so that NaN fails
        return
    most, tokens = metrics["mismatch/max_abs_logprob"], metrics["mismatch/tokens"]
    raise RunError(
        f"step {step}: trainer and sampler differ by {mean:.3g} nats on average, at most by {most:.3g}, over "
        f"{tokens:.0f} tokens that the trained version sampled; sync.max_mismatch is {limit:g}. `rlvr show` marks the "
        "tokens; look at model.dtype and rollout.dtype, at top_p, top_k and min_p, and at sync/canary"
    )
