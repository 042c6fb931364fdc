"""What a verdict is worth: named parts in 0 to 1, summed with the recipe's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sandbox import Verdict


def passed(verdict: Verdict) -> float:
    """1 when every case passes."""
    return float(verdict.verdict == "AC")


def share(verdict: Verdict) -> float:
    """Passing cases over all cases of the task; cases that were not run count as not passed."""
    return verdict.passed / verdict.total if verdict.total else 0.0


def well_formed(verdict: Verdict) -> float:
    """1 when a program was found and compiles."""
    return float(verdict.verdict not in ("NO_CODE", "CE"))


REWARD_PARTS: dict[str, Callable[[Verdict], float]] = {
    "passed": passed,
    "share": share,
    "format": well_formed,
}


def reward_of(verdict: Verdict, weights: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """The weighted sum of the parts, and the parts; no reward at all for INFRA."""
    if verdict.verdict == "INFRA":
        return None, {}
    parts = {name: part(verdict) for name, part in REWARD_PARTS.items()}
    return sum(weights[name] * value for name, value in parts.items()), parts
