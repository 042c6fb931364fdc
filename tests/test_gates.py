from __future__ import annotations

import math

import pytest

from engine.errors import RunError
from engine.gates import GateClosed, check_gates, check_mismatch
from engine.recipe import Gate


def history(*values: float) -> list[dict[str, float]]:
    return [{"pass_rate": value} for value in values]


def test_a_gate_looks_at_its_window_from_its_step_on() -> None:
    gate = Gate(metric="pass_rate", after=3, window=2, stop_if="< 0.2")
    check_gates([gate], history(0.0, 0.0))
    check_gates([gate], history(0.0, 0.0, 0.5))
    with pytest.raises(GateClosed, match=r"pass_rate averages 0.1 .* < 0.2"):
        check_gates([gate], history(0.9, 0.2, 0.0))


@pytest.mark.parametrize(("rule", "closed"), [("> 0.5", True), (">= 0.6", True), ("<= 0.6", True), ("> 0.6", False)])
def test_comparisons(rule: str, closed: bool) -> None:
    gate = Gate(metric="pass_rate", after=1, stop_if=rule)
    if closed:
        with pytest.raises(GateClosed):
            check_gates([gate], history(0.6))
    else:
        check_gates([gate], history(0.6))


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(RunError, match=r"pas_rate.*pass_rate"):
        check_gates([Gate(metric="pas_rate", after=1, stop_if="> 1")], history(0.5))


def test_a_mismatch_above_its_limit_ends_the_run_with_the_figures() -> None:
    step = {"mismatch/mean_abs_logprob": 0.02, "mismatch/max_abs_logprob": 0.3, "mismatch/tokens": 640.0}
    check_mismatch(0.0, 7, step)  # off
    check_mismatch(0.02, 7, step)
    with pytest.raises(RunError, match=r"step 7: .* 0\.02 nats .* 0\.3, over 640 tokens .*max_mismatch is 0\.01"):
        check_mismatch(0.01, 7, step)
    with pytest.raises(RunError, match="differ by nan nats"):
        check_mismatch(0.01, 7, {**step, "mismatch/mean_abs_logprob": math.nan})
