"""A step's batch: groups are sampled until enough of them have a signal, or the recipe's bound is reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.types import Graded, Sampled

Round = tuple[Sequence[Sequence[Graded]], Sequence[Sequence[float]]]
"""Groups and their advantages."""


def fill_batch(
    sample: Callable[[int, int], Round], wanted: int, *, version: int, oversample: int = 0, refill: int = 0
) -> Sampled:
    """Sample `wanted` groups, and `oversample` more each time; replace those without a signal up to `refill` times.

    `sample(count, round)` samples that many groups; rounds count from 0. version: the policy's that will train. With
    oversample or refill the batch is the first `wanted` groups with a signal, fewer if the bound leaves fewer
    (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2, with a bound); without both it is all that was sampled.
    """
    groups: list[Sequence[Graded]] = []
    advantages: list[Sequence[float]] = []
    rounds = 0
    found: list[int] = []
    while rounds <= refill and len(found) < wanted:
        more, more_advantages = sample(wanted - len(found) + oversample, rounds)
        groups += more
        advantages += more_advantages
        rounds += 1
        found = [i for i, row in enumerate(advantages) if any(a != 0.0 for a in row)]
    dynamic = oversample + refill > 0
    return Sampled(groups, advantages, tuple(found[:wanted] if dynamic else range(len(groups))), rounds, version)
