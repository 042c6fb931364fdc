from __future__ import annotations

import math

import pytest

from engine.sync.canary import Canary, CanaryError


def canary() -> Canary:
    check = Canary((1, 2, 3), tolerance=0.01)
    check.check([-1.0, -2.0], [-1.001, -2.0], version=0, changed=False)
    return check


def test_agreement_within_the_tolerance_gives_the_largest_difference() -> None:
    assert canary().check([-1.5, -2.5], [-1.5, -2.505], version=1, changed=True) == pytest.approx(0.005)


@pytest.mark.parametrize("sampler", [[-1.5, -2.6], [math.nan, -2.5], [-1.5, -math.inf]])
def test_a_difference_or_no_number_stops(sampler: list[float]) -> None:
    with pytest.raises(CanaryError, match="version 4"):
        canary().check([-1.5, -2.5], sampler, version=4, changed=True)


def test_weights_that_moved_must_show() -> None:
    with pytest.raises(CanaryError, match="changed nothing"):
        canary().check([-1.001, -2.0], [-1.001, -2.0], version=1, changed=True)
    canary().check([-1.001, -2.0], [-1.001, -2.0], version=1, changed=False)


def test_a_sampler_that_replaces_another_must_say_what_that_one_said() -> None:
    check = canary()
    check.check([-1.5, -2.5], [-1.5, -2.5], version=1, changed=True)
    check.check([-1.5, -2.5], [-1.5, -2.5], version=1, changed=True)
    with pytest.raises(CanaryError, match=r"moved the canary by 0\.018"):
        check.check([-1.509, -2.5], [-1.518, -2.5], version=1, changed=True)


def test_after_versions_that_were_missed_nothing_is_known_of_before() -> None:
    canary().check([-1.5, -2.5], [-1.5, -2.5], version=2, changed=False)
    canary().check([-1.001, -2.0], [-1.001, -2.0], version=2, changed=True)
    with pytest.raises(CanaryError, match="differ by"):
        canary().check([-1.5, -2.5], [-1.6, -2.5], version=2, changed=True)
