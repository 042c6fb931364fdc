"""`rlvr check` and served exports: a real vLLM loads what was written, and says what it computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.check import TEXT_TOKENS, Checked, Difference, _texts, check_texts
from engine.errors import InputError
from engine.record.formats import export
from engine.record.trained import base_of, by_base_names, outline, read
from engine.rollout import Child, Sampler
from engine.rollout.served import Served
from engine.snapshot import Snapshot
from tests.record.trained_tiny import save
from tests.rollout.tiny import VOCABULARY, config, factors, load, logprobs, make_model, merged

LEAVES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")
TEXTS = [tuple((7 * i + 5 * k) % VOCABULARY for i in range(60)) for k in range(3)]
PLACES = 11


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "model", tied=True)


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    save(base.parent / "run" / "adapter", factors(load(base), 1, LEAVES), base)
    return base.parent / "run"


@pytest.fixture(scope="module")
def checked(base: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checked]:
    """One adapter as it should be served and in the ways it should not, all by one vLLM."""
    folder = tmp_path_factory.mktemp("exports")
    new = factors(load(base), 1, LEAVES)
    wrong = {n.replace("model.", "model.language_model.", 1): f for n, f in new.items() if n != "lm_head"}
    folders = {
        "right": export(run, "peft", out=folder / "right").folder,
        "prefix": save(folder / "prefix", wrong, base),
        "part": save(folder / "part", {n.replace("layers.1", "layers.9"): f for n, f in new.items()}, base),
        "another": save(folder / "another", factors(load(base), 2, LEAVES), base),
        "refused": save(folder / "refused", {n.replace("q_proj", "q_porj"): f for n, f in new.items()}, base),
    }
    trained = read(run, None)
    snapshot = base_of(trained, None, any_base=False)
    found = by_base_names(trained, snapshot, outline(snapshot.folder))
    names = list(folders)
    all_checked = check_texts(
        snapshot, trained, found, [folders[n] for n in names], TEXTS, device="cpu", dtype="float32"
    )
    return dict(zip(names, all_checked, strict=True))


@pytest.mark.slow
def test_an_exported_adapter_is_served_as_it_was_trained(checked: dict[str, Checked]) -> None:
    right = checked["right"]
    assert right.failure() is None
    assert (right.layers, len(right.served.bound), right.served.unplaced, right.missing) == (PLACES, PLACES, (), 0)
    assert right.gap.mean < 1e-5
    assert right.gap.largest < 1e-4
    assert right.trained_change.mean > 0.1
    assert right.tokens == sum(len(text) - 1 for text in TEXTS)
    assert right.lines()[0] == "tensors: 22 in the file, 22 bound by vLLM, 0 unexpected, 0 missing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("prefix", r"not applied: 11 of its 11 layers.*no place.*--prefix model\.layers"),
        ("part", r"applied in part: 5 of its 11 layers.*layers\.9"),
        ("another", r"another one: it differs"),
        ("refused", r"vLLM refuses the adapter.*q_porj"),
    ],
)
def test_an_adapter_that_is_not_served_as_trained_is_told(checked: dict[str, Checked], name: str, reason: str) -> None:
    found = checked[name].failure()
    assert found is not None
    assert re.search(reason, found), found
    if name == "prefix":
        assert checked[name].served_change.largest == 0  # vLLM took it without a word and computed the base


@pytest.fixture(scope="module")
def served_merge(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    folder = tmp_path_factory.mktemp("merged")
    done = export(run, "merged", out=folder / "model")
    sampler = Sampler(config(done.folder), Child("cpu", threads=1, log=folder / "log"))
    try:
        sampler.wait_ready()
        yield sampler
    finally:
        sampler.close()


@pytest.mark.slow
def test_vllm_serves_a_merged_model_whose_head_was_untied(base: Path, served_merge: Sampler) -> None:
    model = merged(base, factors(load(base), 1, LEAVES))
    for text in TEXTS:
        gaps = [abs(a - b) for a, b in zip(served_merge.score(text), logprobs(model, text), strict=True)]
        assert sum(gaps) / len(gaps) < 1e-5
        assert max(gaps) < 1e-4


ONE = Served((), ("a", "b"), ())
FINE = Checked(9, 2, ONE, Difference(0.01, 0.1), Difference(0.01, 0.1), Difference(0.1, 1.0), Difference(0.1, 1.0))
NAN = Difference(float("nan"), float("nan"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"gap": Difference(0.03, 0.1)}, "another one"),
        ({"gap": NAN}, "another one"),
        ({"served_change": Difference(0.001, 0.1)}, "is not applied: it changes 0.001"),
        ({"served_change": NAN}, "is not applied"),
        ({"trained_change": Difference(0.03, 0.1)}, "nothing can be told"),
        ({"trained_change": NAN}, "nothing can be told"),
        ({"served": replace(ONE, bound=("a",), unplaced=("b",))}, r"in part: 1 of its 2 layers.*such as b;"),
        ({"served": replace(ONE, bound=("a",))}, r"in part: 1 of its 2 layers"),
        ({"served": replace(ONE, bound=(), unplaced=("a", "b"))}, r"not applied: 2 of its 2"),
        ({"served": replace(ONE, refused="ValueError: no")}, "refuses the adapter: ValueError: no"),
    ],
)
def test_what_counts_as_applied(change: dict[str, object], reason: str | None) -> None:
    found = replace(FINE, **change).failure()  # type: ignore[arg-type]
    assert found is None if reason is None else re.search(reason, found or "")


def test_the_texts_are_those_of_the_tasks_or_built_in_and_end_with_the_tokens(base: Path, run: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    trained, snapshot = read(run, None), Snapshot("here", base, "h")
    with pytest.raises(InputError, match="tokenizer can't be loaded"):
        _texts(snapshot, trained, None, 50)
    inner = Tokenizer(models.BPE(vocab={chr(i): i for i in range(32, 127)}, merges=[], unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(base.parent / "with-tokenizer")
    here = Snapshot("here", base.parent / "with-tokenizer", "h")
    for source in (None, "generated:train"):
        few, many = (_texts(here, trained, source, tokens) for tokens in (50, 5000))
        assert sum(map(len, few)) == 50
        assert few[0] == many[0][: len(few[0])]
        assert max(map(len, many)) <= TEXT_TOKENS
    assert many != _texts(here, trained, None, 5000)
