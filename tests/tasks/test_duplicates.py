"""Near-duplicates, decontamination, sampling and splits."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.tasks import read_tasks
from engine.tasks.cases import Reading
from engine.tasks.curate import heldout_sizes, split_file
from engine.tasks.duplicates import Shingles, cluster, cluster_texts, jaccard, signature, words_of
from engine.tasks.filters import decontaminate, short_enough
from engine.tasks.formats import read_row
from engine.tasks.own import write_own
from engine.tasks.split import shares, split, stratified
from engine.types import Task
from sandbox import StdinCase, StdinTests

TESTS = StdinTests((StdinCase("1\n", "1\n"),))
WORDS = [f"w{n}" for n in range(2000)]


def statement(rng: random.Random, length: int = 80) -> str:
    return " ".join(rng.choices(WORDS, k=length))


def changed(text: str, rng: random.Random, words: int) -> str:
    listed = text.split()
    for place in rng.sample(range(len(listed)), words):
        listed[place] = "changed"
    return " ".join(listed)


def task(name: str, prompt: str, source: str = "s") -> Task:
    return Task(name, prompt, TESTS, source=source)


def test_case_punctuation_and_blanks_do_not_tell_statements_apart() -> None:
    found = cluster_texts(["Add, the NUMBERS.", "add the\nnumbers", "Add the letters!", "", "???", "???"], 0.7)
    assert found.of == (0, 0, 2, 3, 4, 4)
    assert [pair.similarity for pair in found.pairs] == [1.0, 1.0]


def test_every_pair_above_the_threshold_is_found_and_none_below() -> None:
    rng = random.Random(1)
    originals = [statement(rng) for _ in range(150)]
    texts = originals + [changed(text, rng, 1 + i % 6) for i, text in enumerate(originals)]
    found = cluster_texts(texts, 0.7)
    shingle = Shingles(5)
    sets = [set(shingle(words_of(text)).tolist()) for text in texts]
    for one, other in itertools.combinations(range(len(texts)), 2):
        truth = len(sets[one] & sets[other]) / len(sets[one] | sets[other])
        assert (found.of[one] == found.of[other]) == (truth >= 0.7), (one, other, truth)
    assert 0 < len(found.pairs) < 150
    assert all(pair.similarity >= 0.7 for pair in found.pairs)


@given(st.sets(st.integers(0, 2**64 - 1), max_size=60), st.sets(st.integers(0, 2**64 - 1), max_size=60))
def test_the_similarity_is_that_of_the_sets(one: set[int], other: set[int]) -> None:
    arrays = [np.array(sorted(values), np.uint64) for values in (one, other)]
    wanted = len(one & other) / len(one | other) if one | other else 1.0
    assert jaccard(arrays[0], arrays[1]) == pytest.approx(wanted)


def test_minhash_estimates_the_similarity() -> None:
    rng = np.random.default_rng(0)
    minima = signature()
    shared, mine, theirs = (rng.integers(0, 2**63, n, dtype=np.uint64) for n in (400, 100, 100))
    one, other = minima(np.concatenate([shared, mine])), minima(np.concatenate([shared, theirs]))
    assert np.mean(one == other) == pytest.approx(400 / 600, abs=0.15)


@given(st.lists(st.text("ab ", max_size=12), max_size=12), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_clusters_do_not_depend_on_the_order(texts: list[str], rng: random.Random) -> None:
    order = list(range(len(texts)))
    rng.shuffle(order)
    one, other = cluster_texts(texts, 0.7), cluster_texts([texts[i] for i in order], 0.7)
    groups = {frozenset(texts[i] for i in members) for members in one.members().values()}
    again = {frozenset(texts[order[i]] for i in members) for members in other.members().values()}
    assert groups == again


def test_the_words_that_every_prompt_has_make_no_duplicates() -> None:
    rows = [
        {"problem": f"{n} is all there is.", "tests": json.dumps([{"input": "1", "output": "1"}])} for n in range(3)
    ]
    tasks = [found for row in rows if isinstance(found := read_row("deepcoder", row, Reading()), Task)]
    assert len(tasks) == 3
    assert cluster(tasks).of == (0, 1, 2)
    assert decontaminate(tasks[:1], {"other": tasks[1:]}) == (tasks[:1], [])


def test_one_word_changed_is_a_near_duplicate() -> None:
    rng = random.Random(2)
    base = statement(rng)
    tasks = [task("a", base), task("b", changed(base, rng, 1)), task("c", statement(rng))]
    found = cluster(tasks)
    assert found.of == (0, 0, 2)
    assert 0.7 <= found.similarity(0, 1) < 1
    with pytest.raises(ValueError, match="threshold"):
        cluster(tasks, 0.0)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1, max_size=6), st.data())
def test_shares_are_whole_exact_and_within_one_of_the_proportion(sizes: dict[str, int], data: st.DataObject) -> None:
    total = sum(sizes.values())
    count = data.draw(st.integers(0, total))
    given = shares(sizes, count)
    assert sum(given.values()) == count
    for name, size in sizes.items():
        assert 0 <= given[name] <= size
        assert abs(given[name] - (count * size / total if total else 0)) < 1


def tasks_of(rng: random.Random, sizes: dict[str, int]) -> list[Task]:
    names = [name for name, size in sizes.items() for _ in range(size)]
    rng.shuffle(names)
    return [task(f"{name}/{i}", statement(rng), name) for i, name in enumerate(names)]


def test_a_sample_has_its_sources_in_proportion_and_keeps_the_order() -> None:
    tasks = tasks_of(random.Random(3), {"easy": 60, "hard": 30, "rare": 10})
    sample = stratified(tasks, 20, seed=1)
    assert [t.source for t in sample].count("easy") == 12
    assert [t.source for t in sample].count("rare") == 2
    assert sample == [t for t in tasks if t in sample]
    assert sample == stratified(tasks, 20, seed=1) != stratified(tasks, 20, seed=2)
    with pytest.raises(ValueError, match="101 of 100"):
        stratified(tasks, 101, seed=1)


def test_no_part_has_a_near_duplicate_of_another_s_task() -> None:
    rng = random.Random(4)
    tasks = tasks_of(rng, {"easy": 60, "hard": 40})
    tasks += [task(f"near/{i}", changed(str(t.prompt), rng, 1), t.source) for i, t in enumerate(tasks[:30])]
    found = cluster(tasks)
    done = split(tasks, found, {"heldout": 20, "validation": 10}, seed=5)
    assert {name: len(part) for name, part in done.parts.items()} == {"heldout": 20, "validation": 10, "train": 70}
    assert len(done.duplicates) == 30
    place = {t.id: found.of[i] for i, t in enumerate(tasks)}
    kept = [place[t.id] for part in done.parts.values() for t in part]
    assert len(set(kept)) == len(kept) == 100
    assert {(place[pair.id], place[pair.near]) for pair in done.duplicates} <= {(c, c) for c in kept}
    assert sum(t.source == "hard" for t in done.parts["heldout"]) == 8
    assert done == split(tasks, found, {"heldout": 20, "validation": 10}, seed=5)
    fewer = split(tasks, found, {"heldout": 20}, seed=5, train=30)
    assert fewer.not_chosen + len(fewer.duplicates) + 50 == 130
    for sizes, train in (({"heldout": 101}, None), ({"heldout": 50}, 51), ({"train": 1}, None)):
        with pytest.raises(InputError):
            split(tasks, found, sizes, seed=5, train=train)


def test_what_shares_words_with_a_suite_goes() -> None:
    rng = random.Random(6)
    suite = [task("s/0", statement(rng)), task("s/1", "Too short.")]
    inside = " ".join(str(suite[0].prompt).split()[20:28])
    tasks = [
        task("clean", statement(rng)),
        task("eight", f"{statement(rng, 10)}, {inside.upper()}. {statement(rng, 10)}"),
        task("seven", " ".join(inside.split()[:7]) + " " + statement(rng, 10)),
        task("short", "too  short"),
    ]
    kept, removed = decontaminate(tasks, {"suite": suite})
    assert [t.id for t in kept] == ["clean", "seven"]
    assert [(hit.id, hit.suite, hit.other) for hit in removed] == [("eight", "suite", "s/0"), ("short", "suite", "s/1")]
    assert removed[0].words == inside


def test_long_prompts_go() -> None:
    tasks = [task("a", "one two"), task("b", "one two three")]
    kept, long = short_enough(tasks, lambda t: len(str(t.prompt).split()), 2)
    assert (kept, long) == (tasks[:1], [("b", 3)])


def test_a_split_is_files_and_a_manifest(tmp_path: Path) -> None:
    rng = random.Random(7)
    tasks = tasks_of(rng, {"easy": 12, "hard": 8})
    tasks += [task("near", changed(str(tasks[0].prompt), rng, 1), "easy"), task("long", statement(rng, 200), "easy")]
    tasks.append(task("leaked", f"{tasks[1].prompt} and more", "hard"))
    write_own(tmp_path / "all.jsonl", tasks)
    write_own(tmp_path / "suite.jsonl", [task("suite/1", str(tasks[1].prompt))])
    suite = f"file:{tmp_path / 'suite.jsonl'}"
    arguments = (f"file:{tmp_path / 'all.jsonl'}", tmp_path / "out", {"heldout": 5})
    lines = split_file(
        *arguments, train=10, against=(suite,), count_tokens=lambda t: len(str(t.prompt).split()), max_tokens=150
    )
    assert lines[-1].startswith("split: 23 tasks into 5 heldout, 10 train")
    manifest = json.loads((tmp_path / "out" / "split_manifest.json").read_text())
    parts = {name: read_tasks(f"file:{tmp_path / 'out' / name}.jsonl").tasks for name in ("heldout", "train")}
    assert {name: [t.id for t in part] for name, part in parts.items()} == {
        name: list(manifest["parts"][name]["tasks"]) for name in parts
    }
    assert {hit["id"] for hit in manifest["contaminated"]} == {tasks[1].id, "leaked"}
    assert manifest["too_long"] == [{"id": "long", "tokens": 200}]
    near = [pair["id"] for pair in manifest["near_duplicates"]]
    assert manifest["not_chosen"] + len(near) + 15 + 3 == 23
    with pytest.raises(InputError, match="already holds"):
        split_file(*arguments)
    with pytest.raises(InputError, match="nothing is left: 0 too long, 1 share words"):
        split_file(suite, tmp_path / "none", {}, against=(suite,))


@pytest.mark.parametrize("part", ["heldout", "heldout=", "heldout=x", "=3", "train=3", "a/b=3"])
def test_a_part_is_a_name_and_a_size(part: str) -> None:
    assert heldout_sizes(["heldout=500", "validation=100"]) == {"heldout": 500, "validation": 100}
    with pytest.raises(InputError, match="name=count"):
        heldout_sizes([part])
    with pytest.raises(InputError):
        heldout_sizes(["a=1", "a=2"])
