"""The paired bootstrap over problems."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.types import Gain

CHUNK = 500


def paired_bootstrap(before: Mapping[str, float], after: Mapping[str, float], *, resamples: int, seed: int = 0) -> Gain:
    """Resample problems with replacement and take the 2.5th and 97.5th percentile of the mean difference.

    `before` and `after`: a problem's pass rate by its id. Raises ValueError unless both hold the same problems.
    """
    if before.keys() != after.keys() or not before:
        raise ValueError(f"the two results hold different problems: {sorted(before.keys() ^ after.keys())[:5]}")
    difference = np.array([after[problem] - before[problem] for problem in sorted(before)])
    rng = np.random.default_rng(seed)
    means = [
        rng.multinomial(len(difference), np.full(len(difference), 1 / len(difference)), size=size) @ difference
        for size in _chunks(resamples)
    ]
    low, high = np.percentile(np.concatenate(means) / len(difference), [2.5, 97.5])
    return Gain(float(difference.mean()), float(low), float(high))


def interval(rates: Mapping[str, float], *, resamples: int, seed: int = 0) -> Gain:
    """A pass rate over problems with its 95 % interval: the bootstrap against nothing."""
    return paired_bootstrap(dict.fromkeys(rates, 0.0), rates, resamples=resamples, seed=seed)


def _chunks(total: int) -> list[int]:
    return [min(CHUNK, total - start) for start in range(0, total, CHUNK)]
