"""When a run looks unwell: metrics that leave their healthy range, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 8
"""Steps that a metric is averaged over, and how many there must be before it is judged."""


@dataclass(frozen=True, slots=True)
class Range:
    """A metric's healthy range, and what to do on either side of it."""

    metric: str
    low: float
    high: float
    below: str
    above: str


RANGES = (
    Range("entropy", 0.05, 0.5,
          below="the policy has become nearly deterministic: raise loss.clip_high or loss.entropy, or lower optim.lr",
          above="the policy is unsure of what it writes: early in a run that passes; if it grows, lower loss.entropy "
                "or optim.lr"),
    Range("grad_norm", 0.001, 1.0,
          below="almost nothing is learnt from: look at groups/mixed_share and reward/std",
          above="gradients are large: lower optim.lr, or look for a few very long completions"),
    Range("completions/truncated_share", 0.0, 0.3, below="",
          above="many answers run into rollout.max_tokens: raise it, or set loss.mask_truncated"),
    Range("groups/mixed_share", 0.2, 1.0, above="",
          below="few groups have a signal: take tasks that are neither too easy nor too hard, raise "
                "rollout.group_size, or set rollout.refill"),
    Range("mismatch/mean_abs_logprob", 0.0, 0.1, below="",
          above="sampler and trainer disagree about the sampled tokens: use one dtype for both, or set "
                "loss.correction"),
    Range("sandbox/infra", 0.0, 0.0, below="",
          above="programs could not be judged: rlvr sandbox check, and look at log.txt"),
)  # fmt: skip
"""Those of axolotl's docs/training_stability.qmd for GRPO, its share of groups without a spread turned round; and
INFRA, of which there should be none."""


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
            ill = mean > known.high or not mean >= known.low  # NaN is ill
            if ill and known.metric not in self._said:
                self._said.add(known.metric)
                advice = known.above if mean > known.high else known.below
                lines.append(f"warning: {known.metric} averages {mean:.3g} over {len(values)} steps: {advice}")
            elif not ill and known.metric in self._said:
                self._said.remove(known.metric)
                lines.append(f"{known.metric} is healthy again, {mean:.3g}")
        return lines
