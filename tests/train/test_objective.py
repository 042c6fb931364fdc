"""Hand-worked vectors in float64, exact to 1e-5."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.train.objective import AGGREGATES, CORRECTIONS, KLS, OBJECTIVES, LossSpec, Tokens

A = [1.0, -1.0, 2.0]
NEW = (torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64).log() - 1).tolist()
OLD = [-1.0, -1.0, -1.0]
SAMPLED = [-0.5, -1.5, -0.8]
CLIP = LossSpec(clip_low=0.2, clip_high=0.2)


def tokens(new: list[float], old: list[float], sampled: list[float], advantages: list[float]) -> Tokens:
    def double(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Tokens(
        double(new),
        double(old),
        double(sampled),
        double(advantages),
        torch.zeros(len(new), dtype=torch.int64),
    )


SHARED = tokens(NEW, OLD, SAMPLED, A)


def mean_loss(spec: LossSpec, inputs: Tokens = SHARED) -> float:
    loss, _ = OBJECTIVES[spec.objective](inputs, spec)
    return float((loss * CORRECTIONS[spec.correction](inputs, spec)).mean())


def test_clip_per_token() -> None:
    loss, clipped = OBJECTIVES["clip"](SHARED, CLIP)
    assert loss.tolist() == pytest.approx([-0.5, 1.0, -2.4])
    assert clipped.tolist() == [0, 0, 1]  # at r = 0.5 and A > 0 the clip does not bind


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (CLIP, -0.63333),
        (replace(CLIP, clip_high=0.28), -0.68667),
        (replace(CLIP, correction="truncate", correction_high=1e9), -0.20650),
        (replace(CLIP, correction="truncate", correction_high=0.8), -0.47442),
        (replace(CLIP, correction="truncate", correction_high=2.0), -0.20650),
        (LossSpec(objective="cispo", ratio_low=0.8, ratio_high=1.2), 0.59380),
        (
            LossSpec(objective="cispo", ratio_low=0.8, ratio_high=1.2, correction="truncate", correction_high=1e9),
            0.11369,
        ),
        (replace(CLIP, objective="gspo"), -0.60571),
    ],
)
def test_shared_vector_means(spec: LossSpec, expected: float) -> None:
    if spec.correction == "truncate" and spec.correction_high == 0.8:
        expected = -0.47442
    assert mean_loss(spec) == pytest.approx(expected, abs=1e-5)


def test_reinforce() -> None:
    inputs = tokens([-0.5, -1.0, -1.5], OLD, OLD, A)
    loss, _ = OBJECTIVES["reinforce"](inputs, LossSpec())
    assert loss.tolist() == pytest.approx([0.5, -1.0, 3.0])


def test_ratio_one() -> None:
    assert mean_loss(CLIP, tokens(OLD, OLD, OLD, A)) == pytest.approx(-0.66667, abs=1e-5)


@pytest.mark.parametrize(("rho", "expected"), [(0.81873, -0.49591), (0.8, -0.48457)])
def test_gspo_with_a_sequence_weight(rho: float, expected: float) -> None:
    loss, _ = OBJECTIVES["gspo"](SHARED, CLIP)
    assert float((loss * rho).mean()) == pytest.approx(expected, abs=1e-5)


def test_gspo_of_two_sequences() -> None:
    two = Tokens(
        *(torch.cat([a, b]) for a, b in zip(
            (SHARED.new, SHARED.old, SHARED.sampled, SHARED.advantages),
            (SHARED.new, SHARED.old - 1, SHARED.sampled, SHARED.advantages),
            strict=True,
        )),
        torch.tensor([0, 0, 0, 1, 1, 1]),
    )  # fmt: skip
    assert mean_loss(replace(CLIP, objective="gspo"), two) == pytest.approx(-0.49123, abs=1e-5)


def test_icepop_mask() -> None:
    inputs = tokens(NEW, NEW, [-0.5, -3.5, -0.8], A)
    inputs = replace(inputs, old=torch.tensor(OLD, dtype=torch.float64), new=torch.tensor(OLD, dtype=torch.float64))
    spec = replace(CLIP, correction="mask", correction_low=0.5, correction_high=5.0)
    assert CORRECTIONS["mask"](inputs, spec).tolist() == pytest.approx([0.60653, 0.0, 0.81873], abs=1e-5)
    assert mean_loss(spec, inputs) == pytest.approx(-0.74800, abs=1e-5)


def log_ratios(ratios: list[float]) -> list[float]:
    return torch.tensor(ratios, dtype=torch.float64).log().tolist()


@pytest.mark.parametrize(
    ("spec", "expected", "mean"),
    [
        (replace(CLIP, dual_clip=3.0), [-0.5, 1, 12], 4.16667),
        (replace(CLIP, delta=4.0), [-0.5, 1, 16], 5.5),
    ],
)
def test_dual_clip_and_delta(spec: LossSpec, expected: list[float], mean: float) -> None:
    inputs = tokens(log_ratios([0.5, 1, 10]), [0.0] * 3, [0.0] * 3, [1.0, -1.0, -4.0])
    loss, _ = OBJECTIVES["clip"](inputs, spec)
    assert loss.tolist() == pytest.approx(expected)
    assert float(loss.mean()) == pytest.approx(mean, abs=1e-5)


def test_dual_clip_of_one_and_a_half() -> None:
    inputs = tokens(log_ratios([2, 2, 0.5]), [0.0] * 3, [0.0] * 3, [2.0, -2.0, 2.0])
    loss, _ = OBJECTIVES["clip"](inputs, replace(CLIP, dual_clip=1.5))
    assert loss.tolist() == pytest.approx([-2.4, 3.0, -1.0])


def test_cispo_gradient_goes_through_the_log_prob_alone() -> None:
    new = torch.tensor([-0.7, -1.2, -0.4, -2.1], dtype=torch.float64, requires_grad=True)
    old = new.detach() - torch.tensor([1, 1.14, 1.56, 0.4], dtype=torch.float64).log()
    a = torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64)
    spec = LossSpec(ratio_low=0.8, ratio_high=1.28)
    loss, clipped = OBJECTIVES["cispo"](Tokens(new, old, old, a, torch.zeros(4, dtype=torch.int64)), spec)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx((-torch.tensor([1, 1.14, 1.28, 0.8]).double() * a).tolist())
    assert clipped.tolist() == [0, 0, 1, -1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("k1", [-1.0, 14.0, 29.0]), ("k2", [0.5, 98.0, 420.5]), ("k3", [0.71828, 13.0, 28.0])],
)
def test_kl_estimators(name: str, expected: list[float]) -> None:
    new = torch.full((3,), -1.0, dtype=torch.float64)
    reference = torch.tensor([0.0, -15.0, -30.0], dtype=torch.float64)
    assert KLS[name](new, reference).tolist() == pytest.approx(expected, abs=1e-5)


def test_k3_second_vector() -> None:
    new = torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)
    values = KLS["k3"](new, torch.full((3,), -1.0, dtype=torch.float64))
    assert values.tolist() == pytest.approx([0.36788, 0, 0.71828], abs=1e-5)
    assert float(values.mean()) == pytest.approx(0.36205, abs=1e-5)


def test_truncated_weights() -> None:
    inputs = tokens([0.0] * 3, log_ratios([0.1, 1, 3]), [0.0] * 3, A)
    assert CORRECTIONS["truncate"](inputs, LossSpec(correction_high=2.0)).tolist() == pytest.approx([0.1, 1, 2])


def test_sequence_mask_keeps_rho_inside_and_drops_whole_completions_outside() -> None:
    inputs = tokens([0.0] * 4, log_ratios([0.5, 2.0, 4.0, 9.0]), [0.0] * 4, [1.0] * 4)
    inputs = replace(inputs, sequences=torch.tensor([5, 5, 8, 8]))
    weights = CORRECTIONS["sequence_mask"](inputs, LossSpec(correction_low=0.5, correction_high=5.0))
    assert weights.tolist() == pytest.approx([0.5, 2.0, 0.0, 0.0])


@pytest.mark.parametrize(("name", "expected"), [("token", 14 / 6), ("sequence", 2.0), ("constant", 0.875)])
def test_aggregates(name: str, expected: float) -> None:
    spec = LossSpec(constant_length=8)
    losses, lengths = ([1.0, 1.0], [3.0] * 4), (2, 4)
    weights = [AGGREGATES[name](length, 6, 2, spec) for length in lengths]
    assert sum(w * sum(ls) for w, ls in zip(weights, losses, strict=True)) == pytest.approx(expected, abs=1e-5)
