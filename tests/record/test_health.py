from __future__ import annotations

import pytest

from engine.record.health import RANGES, WINDOW, Health

WELL = {
    "entropy": 0.3, "grad_norm": 0.5, "completions/truncated_share": 0.1, "groups/mixed_share": 0.6,
    "mismatch/mean_abs_logprob": 0.01, "sandbox/infra": 0.0,
}  # fmt: skip
ILL = [
    ("entropy", 0.001), ("entropy", 3.0), ("grad_norm", 50.0), ("grad_norm", 0.0), ("grad_norm", float("nan")),
    ("completions/truncated_share", 0.9), ("groups/mixed_share", 0.0), ("mismatch/mean_abs_logprob", 0.5),
    ("sandbox/infra", 8.0),
]  # fmt: skip


def test_every_range_is_tried_here() -> None:
    assert {known.metric for known in RANGES} == WELL.keys() == {metric for metric, _ in ILL}


def test_a_healthy_run_says_nothing() -> None:
    assert Health().look([WELL] * 50) == []


@pytest.mark.parametrize(("metric", "value"), ILL)
def test_a_trouble_is_said_once_with_what_to_do_and_its_end_once(metric: str, value: float) -> None:
    health, history = Health(), [WELL] * WINDOW
    said = []
    for now in [value] * WINDOW + [WELL[metric]] * (WINDOW + 1):
        history.append({**WELL, metric: now})
        said += health.look(history)
    assert [line.startswith(f"warning: {metric} averages") for line in said] == [True, False]
    assert len(said[0].partition(" steps: ")[2]) > 20
    assert "healthy again" in said[1]


def test_a_run_is_not_judged_before_its_window_is_full() -> None:
    ill = WELL | dict(ILL)
    assert Health().look([ill] * (WINDOW - 1)) == []
    assert len(Health().look([ill] * WINDOW)) == len(RANGES)
