from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evaluate import paired_bootstrap


def test_a_constant_gain_has_no_width() -> None:
    before = {str(i): i / 20 for i in range(10)}
    gain = paired_bootstrap(before, {k: v + 0.25 for k, v in before.items()}, resamples=1000)
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.25, 0.25, 0.25))


def test_the_interval_agrees_with_the_normal_one() -> None:
    rng = np.random.default_rng(1)
    before = {str(i): float(rng.random()) for i in range(200)}
    after = {k: v + float(rng.normal(0.1, 0.3)) for k, v in before.items()}
    gain = paired_bootstrap(before, after, resamples=10_000)
    difference = np.array([after[k] - before[k] for k in before])
    half = 1.96 * difference.std() / np.sqrt(len(difference))
    assert (gain.low, gain.high) == pytest.approx((gain.mean - half, gain.mean + half), abs=0.006)


@given(st.dictionaries(st.text(), st.floats(0, 1), min_size=1, max_size=9))
def test_nothing_against_itself_is_nothing(rates: dict[str, float]) -> None:
    gain = paired_bootstrap(rates, rates, resamples=100)
    assert (gain.mean, gain.low, gain.high) == (0, 0, 0)


def test_other_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="different problems"):
        paired_bootstrap({"a": 1.0}, {"b": 1.0}, resamples=100)
