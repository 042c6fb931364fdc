from __future__ import annotations

import math

import pytest
import torch

from engine.train.advantage import ADVANTAGES

NAN = math.nan


def advantages(name: str, rewards: list[float]) -> list[float]:
    return ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("centred", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("group", [1, 0, 0, 0], [1.49970, -0.49990, -0.49990, -0.49990]),
        ("group", [1, 1, 0, 0], [0.86588, 0.86588, -0.86588, -0.86588]),
        ("leave_one_out", [1, 0, 0, 0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("max_rl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("max_rl", [0, 0], [0, 0]),
        ("max_rl", [1, 1], [0, 0]),
    ],
)
def test_hand_worked(name: str, rewards: list[float], expected: list[float]) -> None:
    assert advantages(name, rewards) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(
    "rewards", [[0.35] * 7, [0.4] * 8, [0.1] * 3, [NAN] * 4, [0.7], [NAN, 0.7, NAN], [1e9] * 5, [0.0, 0.0]]
)
def test_a_group_without_spread_or_with_one_reward_is_zero(name: str, rewards: list[float]) -> None:
    assert advantages(name, rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_small_real_difference_is_kept(name: str) -> None:
    assert advantages(name, [0.4] * 7 + [0.41])[-1] > 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nan_rewards_get_zero_and_leave_the_others_as_if_they_were_not_there(name: str) -> None:
    with_nan = advantages(name, [1.0, NAN, 0.0, NAN, 0.0])
    assert with_nan == pytest.approx([*advantages(name, [1.0])[:0], *interleave(advantages(name, [1.0, 0.0, 0.0]))])


def interleave(values: list[float]) -> list[float]:
    return [values[0], 0.0, values[1], 0.0, values[2]]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_one_huge_outlier_stays_finite_and_keeps_its_sign(name: str) -> None:
    values = advantages(name, [1e12] + [0.5] * 7)
    assert all(math.isfinite(v) for v in values)
    assert values[0] > 0 > max(values[1:])
