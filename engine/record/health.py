"""When a run looks unwell: metrics that leave their healthy range, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 8
"""Steps that a metric is averaged over, and how many there must be before it is judged."""


@dataclass(frozen=True, slots=True)
class Range:
    """A metric's healthy range."""

    metric: str
    low: float
    high: float
    advice: str


RANGES = (
    Range("entropy", 0.02, float("inf"), "the policy has become nearly deterministic: raise loss.clip_high or "
          "loss.entropy, or lower optim.lr"),
    Range("grad_norm", 0.0, 10.0, "gradients are large: lower optim.lr, or look for a few very long completions"),
    Range("completions/truncated_share", 0.0, 0.3, "many answers run into rollout.max_tokens: raise it, or set "
          "loss.mask_truncated"),
    Range("groups/mixed_share", 0.2, 1.0, "few groups have a signal: take tasks that are neither too easy nor too "
          "hard, raise rollout.group_size, or set rollout.refill"),
    Range("mismatch/mean_abs_logprob", 0.0, 0.1, "sampler and trainer disagree about the sampled tokens: use one "
          "dtype for both, lower rollout.max_lag, or set loss.correction"),
    Range("sandbox/infra", 0.0, 0.0, "programs could not be judged: rlvr sandbox check, and look at log.txt"),
    Range("sandbox/soft_share", 0.0, 0.05, "verdicts stand on the wall clock because the machine is overloaded: lower "
          "sandbox.workers"),
    Range("train/skipped", 0.0, 0.5, "most steps change nothing: no group has a signal, or gradients are no numbers"),
)  # fmt: skip


class Health:
    """Remembers what was said, so that each trouble is said once until it is over."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look(self, history: Sequence[Mapping[str, float]]) -> list[str]:
        """A line for each metric that has left its range since the last look, and for each that is back."""
        if len(history) < WINDOW:
            return []
        lines = []
        for known in RANGES:
            values = [step[known.metric] for step in history[-WINDOW:] if known.metric in step]
            if not values:
                continue
            mean = sum(values) / len(values)
            ill = not known.low <= mean <= known.high
            if ill and known.metric not in self._said:
                self._said.add(known.metric)
                lines.append(f"warning: {known.metric} averages {mean:.3g} over {len(values)} steps: {known.advice}")
            elif not ill and known.metric in self._said:
                self._said.remove(known.metric)
                lines.append(f"{known.metric} is healthy again, {mean:.3g}")
        return lines
