"""The worked example of docs/extending-the-loss.md does what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.train import objective
from engine.train.objective import OBJECTIVES, LossSpec
from tests.train import test_battery as battery


@pytest.fixture
def bent() -> Iterator[LossSpec]:
    page = Path("docs/extending-the-loss.md").read_text()
    before = dict(OBJECTIVES)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, vars(objective))
    yield LossSpec(objective="bent")
    OBJECTIVES.clear()
    OBJECTIVES.update(before)
    del vars(objective)["bent"]


def test_the_example_passes_the_battery(bent: LossSpec) -> None:
    battery.test_any_cut_and_any_order_gives_the_same_loss_and_gradient(bent)
    battery.test_a_completion_s_gradient_does_not_depend_on_what_the_others_hold(bent)
    battery.test_no_trainable_token_is_a_zero_that_hangs_on_the_graph(bent)
    for on_policy in (False, True):
        battery.test_the_gradient_is_the_finite_difference(bent, on_policy)


def test_its_slope_at_ratio_one_is_the_policy_gradient(bent: LossSpec) -> None:
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, -2.0], dtype=torch.float64)
    tokens = objective.Tokens(new, new.detach(), new.detach(), advantages, torch.zeros(2, dtype=torch.int64))
    OBJECTIVES["bent"](tokens, bent)[0].sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx((-advantages).tolist())
