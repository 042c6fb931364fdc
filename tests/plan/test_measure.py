"""Phase times read back from a run whose phases are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.plan.measure import fit_decode, fit_line, measured
from tests.plan.a_run import LENGTHS, PHASES, write_run


@pytest.mark.parametrize("samplers", [1, 2])
def test_a_run_gives_its_phases_back(tmp_path: Path, samplers: int) -> None:
    devices = ["cpu"] * samplers
    found = measured(write_run(tmp_path / "run", overrides=(f"rollout.devices={devices}",)))
    ours = found.phases
    assert found.steps == 9  # the first warms up
    assert ours.lengths == LENGTHS[3:]
    assert ours.decode_seconds == pytest.approx(PHASES.decode_seconds, rel=0.02 if samplers == 1 else 0.1)
    assert ours.decode_sequence_seconds == pytest.approx(PHASES.decode_sequence_seconds, rel=0.1)
    assert ours.grade_seconds == pytest.approx(PHASES.grade_seconds, rel=0.05)
    assert ours.train_token_seconds == pytest.approx(PHASES.train_token_seconds)
    assert ours.train_step_seconds == pytest.approx(PHASES.train_step_seconds)
    assert ours.sync_seconds == pytest.approx(PHASES.sync_seconds)
    assert found.cores == 2


def test_lengths_that_are_all_alike_give_the_cost_to_the_step_and_say_so(tmp_path: Path) -> None:
    found = measured(write_run(tmp_path / "run", replace(PHASES, lengths=((50,) * 4,))))
    assert found.phases.decode_sequence_seconds == 0.0
    assert found.phases.decode_seconds == pytest.approx(0.02 + 12 * 0.003)
    assert len(found.notes) == 1


def test_no_phase_is_below_nothing() -> None:
    assert fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == (2.0, 0.0)
    assert fit_line([1.0, 2.0], [0.5, 2.0]) == (0.0, pytest.approx(0.9))
    assert fit_line([4.0, 4.0], [1.0, 3.0]) == (2.0, 0.0)
    work = [(10, 100), (20, 100), (10, 300)]
    step, sequence, alike = fit_decode(work, [1.0, 2.0, 0.9])
    assert (step, sequence, alike) == (pytest.approx(0.0983, abs=1e-3), 0.0, False)
    step, sequence, _ = fit_decode(work, [1.0, 0.9, 3.0])
    assert step > 0
    assert sequence == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), ["no metrics.jsonl"]),
        (lambda run: (run / "metrics.jsonl").write_text("{"), ["line 1 of metrics.jsonl"]),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n'), ["line 1", "time/sample"]),
        (lambda run: (run / "metrics.jsonl").write_text(""), ["no step"]),
        (lambda run: (run / "rollouts" / "step-000003.jsonl.gz").unlink(), ["step-000003.jsonl.gz"]),
        (lambda run: (run / "rollouts" / "step-000003.jsonl.gz").write_bytes(b"x"), ["step-000003.jsonl.gz"]),
        (lambda run: (run / "manifest.json").write_text("{}"), ["manifest.json", "cores"]),
        (lambda run: (run / "manifest.json").unlink(), ["manifest.json"]),
        (lambda run: (run / "recipe.toml").unlink(), ["recipe.toml"]),
    ],
)
def test_what_is_no_whole_run_is_refused(tmp_path: Path, break_it, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    run = write_run(tmp_path / "run")
    break_it(run)
    with pytest.raises(InputError) as caught:
        measured(run)
    assert all(word in str(caught.value) for word in words), caught.value
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_whose_stages_overlap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rollout.max_lag = 2 .* --set rollout.max_lag=0"):
        measured(write_run(tmp_path / "run", overrides=("rollout.max_lag=2",)))


def test_refilled_steps_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[4]["groups/rounds"] = 2.0
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert measured(run).steps == 8
