"""The head against whole float64 logits: values, gradients, every option, and other projects' bugs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import lm_head_cpu, lm_head_cpu_tiles
from kernels.lm_head import token_logprobs, token_loss
from tests.kernels.inputs import HeadCase, relative_error

CASES = [
    HeadCase(),
    HeadCase(tokens=300, vocab=2500),
    HeadCase(vocab=1024, width=64, temperature=1.0),
    HeadCase(softcap=5.0),
    HeadCase(rank=8),
    HeadCase(masked=True),
    HeadCase(entropy=0.0),
    HeadCase(tokens=1, vocab=3),
    HeadCase(tokens=261, vocab=2049, softcap=3.0, rank=4, masked=True, temperature=0.6),
    HeadCase(spread=2.0, vocab=1000),
]


BF16_AND_TRUTH = [(torch.float64, "reference"), (torch.bfloat16, "reference"), (torch.bfloat16, "cpu")]


def results(
    case: HeadCase, dtype: torch.dtype, impl: str, form: str, *, frozen: bool = False, likely: bool = False
) -> list[torch.Tensor]:
    """loss, logprob, entropy and the gradients of hidden, weight and the factors, through either entry point.

    frozen: no gradient of the weight. likely: every target is its row's likeliest token.
    """
    made = case.tensors(dtype)
    made["weight"].requires_grad_(not frozen)
    if likely:
        made["targets"] = (made["hidden"].detach().double() @ made["weight"].detach().double().T).argmax(1)
    lora = (made["a"], made["b"], 1.7) if case.rank else None
    valid = made["valid"] if case.masked else None

    def objective(logprob: torch.Tensor, entropy: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        weight = made["advantage"][rows].to(logprob.dtype)
        return (logprob.sigmoid() * weight).sum() - case.entropy * (entropy * weight.abs()).sum()

    options = {
        "temperature": case.temperature,
        "softcap": case.softcap,
        "lora": lora,
        "valid": valid,
        "impl": impl,
    }
    if form == "loss":
        loss, logprob, entropy = token_loss(made["hidden"], made["weight"], made["targets"], objective, **options)
    else:
        logprob, entropy = token_logprobs(made["hidden"], made["weight"], made["targets"], **options)
        rows = slice(0, case.tokens) if valid is None else valid.nonzero().flatten()
        loss = objective(logprob[rows], entropy[rows], rows)
    leaves = [made[n] for n in ("hidden", "weight", "a", "b") if n in made and made[n].requires_grad]
    grads = torch.autograd.grad(loss * -3.0, leaves)
    return [t.detach() for t in (loss, logprob, entropy)] + list(grads)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", ["loss", "logprobs"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_cpu_equals_reference(case: HeadCase, form: str, dtype: torch.dtype, limit: float) -> None:
    got, want = results(case, dtype, "cpu", form), results(case, torch.float64, "reference", "logprobs")
    assert all(g.dtype == dtype for g in got)
    # Peaked rows lose digits in the product itself: nothing can be better than plain PyTorch in the same
    # dtype.
    peer = results(case, dtype, "reference", form)
    for g, p, w in zip(got, peer, want, strict=True):
        assert relative_error(g, w) < max(limit, 1.25 * relative_error(p, w))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", ["loss", "logprobs"])
def test_bf16_is_as_exact_as_the_bf16_reference(case: HeadCase, form: str, bf16_products: str) -> None:
    want = results(case, torch.float64, "reference", "logprobs")
    peer, got = results(case, torch.bfloat16, "reference", form), results(case, torch.bfloat16, "cpu", form)
    names = ["loss", "logprob", "entropy", "hidden", "weight", "a", "b"]
    for name, g, p, w in zip(names, got, peer, want, strict=False):
        if name != "loss":  # a sum whose error cancels by luck in either
            assert relative_error(g, w) <= 1.25 * relative_error(p, w), name


FROZEN = [
    HeadCase(entropy=0.0),
    HeadCase(entropy=0.0, tokens=300, vocab=9001, masked=True),
    HeadCase(entropy=0.0, spread=2.0),
    HeadCase(entropy=0.01),
    HeadCase(entropy=0.0, softcap=5.0),
    HeadCase(entropy=0.0, rank=4),
]


@pytest.mark.parametrize("case", FROZEN, ids=str)
@pytest.mark.parametrize("form", ["loss", "logprobs"])
@pytest.mark.parametrize("likely", [False, True], ids=["any", "likely"])
def test_under_a_frozen_bf16_weight_the_rows_gradients_are_as_exact(
    case: HeadCase, form: str, likely: bool, bf16_products: str
) -> None:
    # Row by row: a likely target's gradient is small, the difference of two nearly equal rows of the weight.
    found = [results(case, *how, form, frozen=True, likely=likely) for how in BF16_AND_TRUTH]
    want, peer, got = (result[3].double() for result in found)  # the gradient of hidden
    size = want.norm(dim=1)
    assert bool((got[size == 0] == 0).all())
    errors = [((x - want).norm(dim=1) / size)[size > 0].mean() for x in (got, peer)]
    assert errors[0] <= 1.25 * errors[1]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 5),
    st.floats(0.2, 3.0),
    st.booleans(),
    st.booleans(),
)
def test_any_shape(tokens: int, vocab: int, width: int, temperature: float, cap: bool, masked: bool) -> None:
    case = HeadCase(tokens, width, vocab, temperature, 4.0 if cap else None, 2, masked)
    got, want = results(case, torch.float64, "cpu", "loss"), results(case, torch.float64, "reference", "loss")
    assert all(torch.allclose(g, w, rtol=1e-9, atol=1e-11) for g, w in zip(got, want, strict=True))


def test_gradient_by_finite_differences() -> None:
    made = HeadCase(tokens=3, width=4, vocab=7, rank=2).tensors(torch.float64)

    def forward(hidden: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple:
        return token_logprobs(
            hidden, weight, made["targets"], temperature=0.8, softcap=2.0, lora=(a, b, 0.5), impl="cpu"
        )

    assert torch.autograd.gradcheck(forward, [made[n] for n in ("hidden", "weight", "a", "b")])


@pytest.mark.parametrize(("chunk", "tile"), [(8, 64), (77, 1000), (256, 13)])
def test_chunks_change_no_number_by_more_than_rounding(chunk: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA/TransformerEngine#3193: the gradient is gathered in fp32, its error must not grow with the chunks."""
    case = HeadCase(rank=4, masked=True)
    want = results(case, torch.float64, "reference", "loss")
    monkeypatch.setattr(lm_head_cpu.CpuHead, "chunk", chunk)
    monkeypatch.setattr(lm_head_cpu_tiles, "TILE", tile)
    got = results(case, torch.float32, "cpu", "loss")
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) < 5e-6


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_ragged_vocabulary_adds_nothing(impl: str) -> None:
    """verl-project/verl#2656: columns beyond the vocabulary must not enter the sum; very peaked logits."""
    made = HeadCase(vocab=1000, spread=25.0).tensors(torch.float32)
    logprob, entropy = token_logprobs(made["hidden"], made["weight"], made["targets"], impl=impl)
    logits = made["hidden"].double() @ made["weight"].double().T
    want = logits.log_softmax(1).gather(1, made["targets"][:, None]).squeeze(1)
    assert logprob.max() <= 0
    assert entropy.min() >= 0
    torch.testing.assert_close(logprob.double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("offset", [-50.0, 1e4])
def test_a_common_offset_of_all_logits(offset: float) -> None:
    """verl#7439 (all logits negative), pytorch#195829 (log(sum) + max loses bits): log-probs do not move."""
    made = HeadCase(width=16, vocab=1100, temperature=1.0).tensors(torch.float64)
    # One more dimension, constant in the weight, shifts every logit of a row; exact in fp32 for these values.
    hidden = torch.cat([made["hidden"].detach(), torch.full((77, 1), offset)], 1)
    weight = torch.cat([made["weight"].detach(), torch.ones(1100, 1)], 1)
    want = token_logprobs(hidden[:, :-1], weight[:, :-1].contiguous(), made["targets"], impl="reference")
    got = token_logprobs(hidden.float(), weight.float(), made["targets"], impl="cpu")
    # The product itself rounds logits of size `offset` to one unit in the last place of fp32.
    limit = 3 * abs(offset) * 2**-23
    assert all((g.double() - w).abs().max() < limit for g, w in zip(got, want, strict=True))


def test_masked_rows_are_never_projected() -> None:
    """A masked row may hold anything: NaN hidden state, a sentinel target (apple/ml-cross-entropy#59)."""
    made = HeadCase(masked=True).tensors(torch.float32)
    valid = made["valid"]
    hidden, targets = made["hidden"].detach().clone(), made["targets"].clone()
    want = token_loss(hidden.requires_grad_(), made["weight"], targets, _total, valid=valid, impl="cpu")
    clean = torch.autograd.grad(want[0], hidden)[0]
    dirty = hidden.detach().clone()
    dirty[~valid], targets[~valid] = torch.nan, -100
    got = token_loss(dirty.requires_grad_(), made["weight"], targets, _total, valid=valid, impl="cpu")
    grad = torch.autograd.grad(got[0], dirty)[0]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert torch.equal(grad, clean)
    assert not got[1][~valid].any()
    assert not got[2][~valid].any()
    assert not grad[~valid].any()


def _total(logprob: torch.Tensor, entropy: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    return -logprob.sum() - 0.1 * entropy.sum()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_valid_row_gives_a_connected_zero(impl: str, tokens: int) -> None:
    """huggingface/trl#7077, NVIDIA-NeMo/Automodel#3796: zero, finite, and backward runs."""
    made = HeadCase(tokens=5, rank=2).tensors(torch.float32)
    hidden = made["hidden"].detach()[:tokens].requires_grad_()
    lora = (made["a"], made["b"], 1.0)
    valid = torch.zeros(tokens, dtype=torch.bool)
    loss, _, _ = token_loss(hidden, made["weight"], made["targets"][:tokens], _total, lora=lora, valid=valid, impl=impl)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert not made["weight"].grad.any()
    assert not made["a"].grad.any()
    assert not made["b"].grad.any()


def test_upstream_gradient_is_per_token() -> None:
    """linkedin/Liger-Kernel#1298: every row has its own factor."""
    made = HeadCase(entropy=0).tensors(torch.float64)
    factors = torch.randn(2, 77, dtype=torch.float64)
    grads = []
    for impl in ("cpu", "reference"):
        out = token_logprobs(made["hidden"], made["weight"], made["targets"], impl=impl)
        grads.append(torch.autograd.grad(out, made["hidden"], list(factors))[0])
    assert relative_error(*grads) < 1e-13


def test_rows_without_coefficient_are_left_out_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HeadCase(tokens=64).tensors(torch.float32)
    seen: list[int] = []
    multiply = lm_head_cpu.CpuHead.multiply

    def spy(head: lm_head_cpu.CpuHead, g: torch.Tensor, *rest: object) -> None:
        seen.append(g.shape[0])
        multiply(head, g, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(lm_head_cpu.CpuHead, "multiply", spy)
    keep = torch.zeros(64)
    keep[[3, 40, 41]] = 1

    def few(logprob: torch.Tensor, entropy: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        return (logprob * keep[rows]).sum()

    loss, _, _ = token_loss(made["hidden"], made["weight"], made["targets"], few, impl="cpu")
    grad = torch.autograd.grad(loss, made["hidden"])[0]
    assert set(seen) == {3}
    want = torch.autograd.grad(
        token_logprobs(made["hidden"], made["weight"], made["targets"], impl="reference")[0] @ keep,
        made["hidden"],
    )[0]
    assert relative_error(grad, want) < 5e-6
    assert not grad[keep == 0].any()
    seen.clear()
    token_loss(made["hidden"], made["weight"], made["targets"], lambda p, e, r: (p * 0).sum(), impl="cpu")
    assert not seen


@pytest.mark.parametrize("form", ["loss", "logprobs"])
def test_a_row_changes_no_bit_of_another(form: str) -> None:
    made = HeadCase(tokens=300, vocab=2500).tensors(torch.float32)
    changed = made["hidden"].detach().clone()
    changed[130] = torch.randn(48) * 10
    outs = []
    for hidden in (made["hidden"].detach().clone().requires_grad_(), changed.requires_grad_()):
        if form == "loss":
            loss, logprob, entropy = token_loss(hidden, made["weight"], made["targets"], _total, impl="cpu")
        else:
            logprob, entropy = token_logprobs(hidden, made["weight"], made["targets"], impl="cpu")
            loss = _total(logprob, entropy, slice(0, 300))
        outs.append((logprob.detach(), entropy.detach(), torch.autograd.grad(loss, hidden)[0]))
    others = torch.arange(300) != 130
    assert all(torch.equal(x[others], y[others]) for x, y in zip(*outs, strict=True))
    assert not torch.equal(outs[0][0][130], outs[1][0][130])


def test_strided_hidden_rows() -> None:
    """NVIDIA/TransformerEngine#2734: stride(-1) == 1 with another row stride, and a transposed weight."""
    made = HeadCase().tensors(torch.float32)
    wide = torch.randn(77, 96)
    wide[:, :48] = made["hidden"].detach()
    hidden, weight = wide[:, :48], made["weight"].detach().T.contiguous().T
    got = token_logprobs(hidden, weight, made["targets"], impl="cpu")
    want = token_logprobs(made["hidden"], made["weight"], made["targets"], impl="reference")
    assert all(relative_error(g, w) < 2e-6 for g, w in zip(got, want, strict=True))


def test_tied_head_gets_the_sum_of_both_gradients() -> None:
    """verl-project/verl#4174: the embedding is the head's weight."""
    table = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.randint(0, 50, (2, 6))
    grads = []
    for impl in ("cpu", "reference"):
        loss, _, _ = token_loss(table[ids].tanh(), table, targets, _total, impl=impl)
        grads.append(torch.autograd.grad(loss, table)[0])
    assert relative_error(*grads) < 1e-13


def test_frozen_weight_costs_no_gradient_and_changes_nothing() -> None:
    made = HeadCase().tensors(torch.float32)
    want = torch.autograd.grad(
        token_loss(made["hidden"], made["weight"], made["targets"], _total, impl="cpu")[0], made["hidden"]
    )[0]
    frozen = made["weight"].detach()
    loss, _, _ = token_loss(made["hidden"], frozen, made["targets"], _total, impl="cpu")
    assert torch.equal(torch.autograd.grad(loss, made["hidden"])[0], want)


def test_no_grad_mode_keeps_no_gradient() -> None:
    made = HeadCase().tensors(torch.float32)
    with torch.no_grad():
        loss, logprob, _ = token_loss(made["hidden"], made["weight"], made["targets"], _total, impl="cpu")
    want = token_loss(made["hidden"], made["weight"], made["targets"], _total, impl="cpu")
    assert not loss.requires_grad
    assert torch.equal(loss, want[0])
    assert torch.equal(logprob, want[1])


def test_gradient_can_be_used_once_only() -> None:
    made = HeadCase().tensors(torch.float32)
    loss, _, _ = token_loss(made["hidden"], made["weight"], made["targets"], _total, impl="cpu")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_errors_of_the_objective_reach_the_caller() -> None:
    made = HeadCase().tensors(torch.float32)

    def broken(logprob: torch.Tensor, entropy: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        token_loss(made["hidden"], made["weight"], made["targets"], broken, impl="cpu")
    with pytest.raises(ValueError, match="scalar"):
        token_loss(made["hidden"], made["weight"], made["targets"], lambda p, e, r: p, impl="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.full((77,), 1000)}, "targets must lie in 0..999"),
        ({"targets": torch.full((77,), -100)}, "targets must lie in 0..999"),
        ({"targets": torch.zeros(76, dtype=torch.int64)}, r"targets must be int64 \[77\]"),
        ({"targets": torch.zeros(77)}, "targets must be int64"),
        ({"weight": torch.zeros(1000, 47)}, r"hidden \[tokens, width\] and weight"),
        ({"weight": torch.zeros(1000, 48, dtype=torch.float64)}, "weight is torch.float64"),
        ({"temperature": 0.0}, "temperature must be finite and above 0"),
        ({"softcap": -1.0}, "softcap must be finite and above 0"),
        ({"valid": torch.ones(77)}, "valid must be bool"),
        ({"lora": (torch.zeros(2, 48), torch.zeros(999, 2), 1.0)}, r"lora A \[r, 48\] and B \[1000, r\]"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    made = HeadCase().tensors(torch.float32)
    arguments = {name: made[name] for name in ("hidden", "weight", "targets")} | change
    with pytest.raises(ValueError, match=message):
        token_logprobs(**arguments)
