"""What holds for every entry of every table of the loss, the ones that are added later included.

The entries are taken from the tables themselves: a new function and its line in a table is run through all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from engine.train.loss import Rows, loss_of_rows, row_weights
from engine.train.objective import AGGREGATES, CORRECTIONS, KLS, OBJECTIVES, SEQUENCE_LEVEL, LossSpec

LENGTHS = [3, 1, 5, 2, 7]
ENTRIES = [
    *[replace(LossSpec(), objective=name) for name in OBJECTIVES],
    *[replace(LossSpec(), correction=name) for name in CORRECTIONS],
    *[replace(LossSpec(), aggregate=name, constant_length=9) for name in AGGREGATES],
    *[replace(LossSpec(), kl=name, kl_coefficient=0.3) for name in KLS],
    replace(LossSpec(), entropy_coefficient=0.2),
    replace(LossSpec(), dual_clip=3.0, delta=4.0),
    replace(LossSpec(), objective="gspo", correction="sequence_mask", aggregate="sequence", kl_coefficient=0.1),
]


def entry_name(spec: LossSpec) -> str:
    plain = LossSpec()
    return (
        ",".join(f"{k}={getattr(spec, k)}" for k in spec.__slots__ if getattr(spec, k) != getattr(plain, k)) or "plain"
    )


every_entry = pytest.mark.parametrize("spec", ENTRIES, ids=entry_name)


def step(spec: LossSpec, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """New log-probs and entropies (leaves) and rows of a made-up step; ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    new = normal(1.0) - 2.0
    rows = Rows(
        sampled=new + normal(0.5),
        advantages=normal(1.0),
        sequences=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
        weights=row_weights(LENGTHS, spec, n, len(LENGTHS)).double(),
        step_tokens=n,
        old=new + normal(0.5),
        reference=new + normal(0.5),
    )
    return new.requires_grad_(), (normal(1.0).abs() + 0.1).requires_grad_(), rows


def gradients(
    new: torch.Tensor, entropy: torch.Tensor, rows: Rows, spec: LossSpec, cuts: list[torch.Tensor]
) -> tuple[float, torch.Tensor]:
    loss = torch.stack([loss_of_rows(new[at], entropy[at], rows, spec, at) for at in cuts]).sum()
    grads = torch.autograd.grad(loss, (new, entropy), allow_unused=True, materialize_grads=True)
    return loss.item(), torch.cat(grads)


@every_entry
def test_any_cut_and_any_order_gives_the_same_loss_and_gradient(spec: LossSpec) -> None:
    new, entropy, rows = step(spec)
    everything = torch.arange(len(new))
    whole, expected = gradients(new, entropy, rows, spec, [everything])
    sequences = list(everything.split(LENGTHS))
    cuts = [sequences, [torch.cat([sequences[i] for i in (3, 0)]), torch.cat([sequences[i] for i in (4, 2, 1)])]]
    if not SEQUENCE_LEVEL & {spec.objective, spec.correction}:
        cuts.append(list(everything.flip(0).split(4)))  # token-level: completions may be cut apart
    for cut in cuts:
        loss, found = gradients(new, entropy, rows, spec, cut)
        assert loss == pytest.approx(whole, abs=1e-12)
        assert torch.allclose(found, expected, atol=1e-14)


@every_entry
def test_a_completion_s_gradient_does_not_depend_on_what_the_others_hold(spec: LossSpec) -> None:
    new, entropy, rows = step(spec)
    everything = torch.arange(len(new))
    mine = rows.sequences == 2
    _, before = gradients(new, entropy, rows, spec, [everything])
    for content in (1e4, -1e4):  # finite in a log-ratio of zero, so that only a leak can show
        values = {name: torch.where(mine, getattr(rows, name), content) for name in ("sampled", "advantages")}
        others = replace(
            rows,
            **values,
            old=torch.where(mine, rows.old, content),
            reference=torch.where(mine, rows.reference, content),
        )
        changed = torch.where(mine, new.detach(), content).requires_grad_()
        _, after = gradients(changed, entropy, others, spec, [everything])
        both = torch.cat([mine, mine])
        assert torch.equal(after[both], before[both])


@contextmanager
def detach_replayed(record: list[torch.Tensor], replay: bool) -> Iterator[None]:
    """Tensor.detach gives what it gave the first time, so that a finite difference sees stop-gradients as constants."""
    plain: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    position = 0

    def detach(self: torch.Tensor) -> torch.Tensor:
        nonlocal position
        if not replay:
            record.append(plain(self).clone())
            return plain(self)
        position += 1
        return record[position - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "detach", detach)
        yield


@every_entry
@pytest.mark.parametrize("on_policy", [False, True], ids=["old", "old is new"])
def test_the_gradient_is_the_finite_difference(spec: LossSpec, on_policy: bool) -> None:
    new, entropy, rows = step(spec, seed=3)
    rows = replace(rows, old=None) if on_policy else rows
    _, analytic = gradients(new, entropy, rows, spec, [torch.arange(len(new))])
    flat = torch.cat([new.data, entropy.data])
    n, record = len(new), list[torch.Tensor]()

    def loss(values: torch.Tensor, replay: bool) -> float:
        with detach_replayed(record, replay), torch.no_grad():
            return float(loss_of_rows(values[:n], values[n:], rows, spec, slice(None)))

    loss(flat, replay=False)
    numeric = torch.empty_like(flat)
    for i in range(len(flat)):
        up, down = flat.clone(), flat.clone()
        up[i] += 1e-6
        down[i] -= 1e-6
        numeric[i] = (loss(up, replay=True) - loss(down, replay=True)) / 2e-6
    if on_policy and spec.objective == "clip" and spec.delta == 0 and spec.dual_clip == 0:
        assert float(analytic.abs().max()) > 0  # at ratio 1 the clip must not eat the gradient
    assert torch.allclose(analytic, numeric, atol=1e-7), (analytic - numeric).abs().max()


@every_entry
def test_no_trainable_token_is_a_zero_that_hangs_on_the_graph(spec: LossSpec) -> None:
    empty = torch.empty(0, dtype=torch.float64)
    rows = Rows(empty, empty, empty.long(), row_weights([], spec, 1, 1).double(), 1, empty, empty)
    new, entropy = empty.clone().requires_grad_(), empty.clone().requires_grad_()
    loss = loss_of_rows(new, entropy, rows, spec, slice(None))
    assert float(loss) == 0.0
    assert loss.requires_grad


@pytest.mark.parametrize("name", AGGREGATES)
def test_twice_the_completions_weigh_half(name: str) -> None:
    spec = LossSpec(aggregate=name, constant_length=8)
    once, twice = row_weights(LENGTHS, spec, 18, 5), row_weights(LENGTHS * 2, spec, 36, 10)
    assert torch.allclose(twice, torch.cat([once, once]) / 2)
