"""Every format's sample file: what is read, what is rejected, and for which reason."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tasks import read_tasks
from engine.tasks.cases import Reading, limits_of
from engine.tasks.formats import FORMATS, read_row
from engine.tasks.livecodebench import pickled_text
from engine.tasks.prompt import call_prompt, code_prompt, statement_of, stdin_prompt
from engine.tasks.row import BadRow, Rejected, embedded, reference, wide_integers
from engine.types import Task
from sandbox import AssertTests, CallCase, CallTests, Limits, StdinCase, StdinTests

DATA = Path(__file__).resolve().parents[1] / "data"
BIG = "7" * 5000

EXPECTED: dict[str, tuple[list[str], list[str]]] = {
    "kodcode": (
        ["kodcode/Prefill_1_I", "kodcode/Algorithm_2_C"],
        ["the tests import a package", "no cases", "the tests are not Python", "a field is empty"],
    ),
    "verifiable": (
        [f"verifiable/vfc_{n}" for n in (1, 2, 3, 7)],
        ["no hidden case", "no cases", "not Python", "cases of an unknown type", "every expected output is empty",
         "a field cannot be read"],
    ),
    "deepcoder": (
        ["deepcoder/50bee098c9412f62", "deepcoder/2af10f6a16dd5eb9", "deepcoder/d5181b728694bb37",
         "deepcoder/c2e64b5bd80750ef", "deepcoder/a6a63a67efb22056"],
        ["no cases", "no cases", "cases of an unknown type", "no entry point", "a repeated row"],
    ),
    "apps": (
        [f"apps/{n}" for n in (0, 1, 2, 3, 8)],
        ["no cases", "no cases", "inputs and outputs differ in number", "a field cannot be read"],
    ),
    "taco": (
        ["taco/d6618bfc5d2f59c0", "taco/bfe2724db0d0aee8"],
        ["a field cannot be read", "a field is empty"],
    ),
    "livecodebench": (
        ["livecodebench/h_a", "livecodebench/2001"],
        ["a pickle that is not plain text"] * 3 + ["a field cannot be read", "no hidden case", "no cases"],
    ),
    "humaneval": (
        ["HumanEval/0", "HumanEval/1", "HumanEvalPlus/2", "HumanEvalPlus/3", "HumanEvalPlus/4"],
        ["no cases", "a field is empty", "no cases"],
    ),
    "mbpp": (
        ["MBPP/1", "MBPP/2", "MBPPPlus/3"],
        ["no hidden case", "no cases", "EvalPlus's native MBPP+", "no entry point"],
    ),
    "rlvr": (
        ["sum/1", "any/2", "call/3", "tagged/4", "assert/5"],
        ["not JSON", "an unknown key", "no cases", "a field cannot be read", "an unknown key", "not an object",
         "an id of another row"],
    ),
}  # fmt: skip


def sample(kind: str, options: str = "") -> dict[str, Task]:
    return {task.id: task for task in read_tasks(f"file:{DATA / kind}.jsonl?format={kind}{options}").tasks}


def row(kind: str, number: int) -> dict[str, object]:
    lines = (DATA / f"{kind}.jsonl").read_text().splitlines()
    with wide_integers():
        found = json.loads(lines[number])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_a_sample_gives_its_good_rows_and_a_reason_for_each_other(kind: str) -> None:
    loaded = read_tasks(f"file:{DATA / kind}.jsonl?format={kind}")
    assert ([task.id for task in loaded.tasks], [bad.reason for bad in loaded.rejected]) == EXPECTED[kind]
    for task in loaded.tasks:
        assert isinstance(task.tests, AssertTests) or task.tests.cases
        assert statement_of(task).strip()


def test_kodcode_keeps_its_tests_and_says_what_to_define() -> None:
    first, second = sample("kodcode").values()
    assert isinstance(first.tests, AssertTests)
    assert first.tests.entry_point == "pairs_with_sum"
    assert "def pairs_with_sum(numbers, target):" in str(first.prompt)
    assert first.source == "kodcode/Prefill/easy"
    assert "\r" not in f"{second.prompt}{second.reference}{second.tests}"
    assert second.reference is not None
    assert second.reference.startswith("def unroll")  # out of its fence


def test_verifiable_leaves_out_what_the_statement_shows() -> None:
    tasks = sample("verifiable")
    stairs = tasks["verifiable/vfc_1"]
    # Of five cases two are examples and one is there twice; Windows line ends are gone.
    assert stairs.tests == StdinTests((StdinCase("1\n", "1\n"), StdinCase("10\n", "89\n")))
    assert stairs.limits == Limits(cpu_seconds=3.0, memory_mb=512)
    every = sample("verifiable", "&cases=all")["verifiable/vfc_1"].tests
    assert isinstance(every, StdinTests)
    assert len(every.cases) == 4
    assert tasks["verifiable/vfc_2"].tests == StdinTests(
        (StdinCase("12\n", "21\n"), StdinCase(f"{BIG}1\n", f"1{BIG}\n"))
    )  # from the text of a dict
    assert tasks["verifiable/vfc_3"].tests == CallTests("total", (CallCase(([1, 2, 3],), 6), CallCase(([],), 0)))


def test_deepcoder_keeps_taco_s_function_and_reads_a_value_a_line() -> None:
    stdin, taco, functional, timed, big = sample("deepcoder").values()
    assert isinstance(stdin.tests, StdinTests)
    assert taco.tests == CallTests("total", (CallCase(([1, 2, 3],), 6), CallCase(([],), 0)))
    assert functional.tests == CallTests("below", (CallCase(([4, 4], 4), 0),))  # the other is the statement's example
    assert "def below(self" in str(functional.prompt)
    assert timed.limits is not None
    assert timed.limits.cpu_seconds == 10  # twice 9, but no more than 10
    assert isinstance(big.tests, CallTests)
    assert big.tests.cases[0].result == (10**5000 - 1) // 9 * 7 + 1


def test_apps_reads_lists_of_lines_and_big_integers_and_unwraps_results_once() -> None:
    tasks = sample("apps")
    lines = tasks["apps/0"]
    assert lines.tests == StdinTests((StdinCase("c b a\nz y\n", "a b c\ny z\n"), StdinCase("q p\n", "p q\n")))
    assert lines.reference is not None
    assert lines.reference.startswith("import sys")  # the first solution is Python 2
    assert tasks["apps/1"].tests == CallTests("scale", (CallCase(([1, 2], 3), [3, 6]), CallCase(([], 9), [])))
    assert isinstance(tasks["apps/2"].tests, CallTests)
    assert tasks["apps/2"].tests.cases[1].result == (10**5000 - 1) // 9 * 70
    assert tasks["apps/3"].tests == StdinTests((StdinCase(f"{BIG}\n", f"{BIG}\n"), StdinCase("5\n", "5\n")))


def test_taco_s_limits_are_kept_within_bounds() -> None:
    rows, double = sample("taco").values()
    assert rows.limits == Limits(cpu_seconds=4.0, memory_mb=1024)
    assert double.limits is None
    assert double.source == "taco/geeks-for-geeks/UNKNOWN_DIFFICULTY"
    assert limits_of("0.5 seconds") == Limits(cpu_seconds=1.0, memory_mb=256)
    assert limits_of(float("nan")) is None


def test_livecodebench_judges_by_the_private_cases() -> None:
    tasks = sample("livecodebench")
    assert tasks["livecodebench/h_a"].tests == StdinTests((StdinCase("8\n", "4\n"), StdinCase("0\n", "0\n")))
    below = CallTests("below", (CallCase(([4, 4], 4), 0), CallCase((["a"], "b"), 1)))
    assert tasks["livecodebench/2001"].tests == below
    every = sample("livecodebench", "&cases=all")
    assert set(every) == {*tasks, "livecodebench/public"}
    assert every["livecodebench/h_a"].tests == StdinTests(
        (StdinCase("7\n", "3\n"), StdinCase("8\n", "4\n"), StdinCase("0\n", "0\n"))
    )


class Calls:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_read_and_never_carried_out(protocol: int, tmp_path: Path) -> None:
    text = json.dumps([{"input": "ä\u2028\U0001f600\n", "output": "x" * 70_000, "testtype": "stdin"}])
    assert pickled_text(pickle.dumps(text, protocol)) == text
    for bad in (Calls(tmp_path / "called"), ["[]", Calls(tmp_path / "called")], b"[]", 1, None, ["[]"], ("[]", "[]")):
        packed = base64.b64encode(zlib.compress(pickle.dumps(bad, protocol))).decode()
        found = read_row("livecodebench", {**row("livecodebench", 0), "private_test_cases": packed}, Reading())
        assert isinstance(found, Rejected)
        assert found.reason == "a pickle that is not plain text"
    assert not (tmp_path / "called").exists()


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_of_pickles_fail_in_another_way(data: bytes) -> None:
    try:
        assert isinstance(pickled_text(data), str)
    except BadRow:
        pass


def test_a_bomb_is_not_unpacked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tasks.livecodebench.MAX_BYTES", 1 << 16)
    bomb = base64.b64encode(zlib.compress(pickle.dumps("[" + " " * (1 << 20) + "]"))).decode()
    found = read_row("livecodebench", {**row("livecodebench", 0), "private_test_cases": bomb}, Reading())
    assert isinstance(found, Rejected)
    assert "MiB unpacked" in found.detail


def test_humaneval_has_two_prompts_and_takes_helpers_along() -> None:
    tasks, complete = sample("humaneval"), sample("humaneval", "&prompt=complete")
    code = row("humaneval", 0)["prompt"]
    assert (tasks["HumanEval/0"].starter, complete["HumanEval/0"].starter) == ("", code)
    assert complete["HumanEval/0"].prompt == code
    helper = tasks["HumanEval/1"].tests
    assert isinstance(helper, AssertTests)
    assert "def square" in helper.code
    assert "def lowest" not in helper.code
    plus = CallTests("clamp", (CallCase((5, 1, 3), 3), CallCase((-5, 1, 3), 1), CallCase((2, 1, 3), 2)))
    assert tasks["HumanEvalPlus/2"].tests == plus
    assert "import numpy" not in str(tasks["HumanEvalPlus/3"].tests)


def test_a_looser_tolerance_stays_test_code() -> None:
    loose = {**row("humaneval", 2), "test": str(row("humaneval", 2)["test"]).replace("exp, 0)", "exp, 0.001)")}
    found = read_row("humaneval", loose, Reading())
    assert isinstance(found, Task)
    assert isinstance(found.tests, AssertTests)


def test_mbpp_shows_the_first_assertion_and_judges_by_the_others() -> None:
    tasks, every = sample("mbpp"), sample("mbpp", "&cases=all")
    first = tasks["MBPP/1"]
    assert "assert shared((1, 2), (2, 3)) == (2,)" in str(first.prompt)
    assert isinstance(first.tests, AssertTests)
    assert "(1, 2), (2, 3)" not in first.tests.code
    assert first.tests.code.count("assert ") == 2
    assert str(every["MBPP/1"].tests).count("assert ") == 3
    plus = tasks["MBPPPlus/3"].tests
    assert plus == CallTests("swap", (CallCase(("a", {3}), ({3}, "a")), CallCase(((), None), (None, ()))))


def test_a_bound_on_the_cases_chooses_the_same_ones_each_time() -> None:
    many = {"problem": "Print n.", "tests": json.dumps([{"input": f"{n}", "output": f"{n}"} for n in range(100)])}
    found = [read_row("deepcoder", many, Reading(max_cases=10)) for _ in range(2)]
    assert found[0] == found[1]
    assert isinstance(found[0], Task)
    assert isinstance(found[0].tests, StdinTests)
    numbers = [int(case.input) for case in found[0].tests.cases]
    assert len(numbers) == 10
    assert numbers == sorted(numbers) != list(range(10))
    few = read_row("deepcoder", many, Reading(min_cases=101))
    assert isinstance(few, Rejected)
    assert (few.reason, few.detail) == ("too few cases", "100")


@pytest.mark.parametrize("style", ["statement", "instruct", "livecodebench"])
def test_a_statement_is_found_again_in_its_prompt(style: str) -> None:
    statement = "Sum.\n\nInput: two numbers."
    for prompt in (stdin_prompt(statement, style), call_prompt(statement, "", "f", style)):
        found = Task("t", prompt, StdinTests(()))
        assert statement_of(found).strip() == statement
        assert statement_of(Task("t", ({"role": "user", "content": prompt},), StdinTests(()))).strip() == statement
    assert "Please" not in statement_of(Task("t", code_prompt("def f(): ..."), StdinTests(())))


def test_data_in_text_never_runs() -> None:
    with pytest.raises(BadRow):
        embedded("__import__('os').getcwd()", "it")
    assert embedded("{'a': (1, None)}", "it") == {"a": (1, None)}
    assert embedded(f"[{BIG}]", "it") == [(10**5000 - 1) // 9 * 7]
    with pytest.raises(BadRow):
        embedded("1" * 200_000, "it")
    with pytest.raises(BadRow):
        embedded("[" * 100_000, "it")


def test_a_reference_is_the_first_that_is_python_3() -> None:
    assert reference(["print 1", "```python\nprint(1)\n```"]) == "print(1)"
    assert reference(json.dumps(["print 1"])) == "print 1"
    assert reference("print(2)") == "print(2)"
    assert reference("[print(x) for x in (1, 2)]") == "[print(x) for x in (1, 2)]"
    assert reference(None) is reference([]) is reference(["", 3]) is reference("") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({key for kind in FORMATS for key in row(kind, 0)})


@given(st.sampled_from(sorted(FORMATS)), st.integers(0, 2), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_whatever_a_row_holds_it_is_a_task_or_rejected(kind: str, number: int, changes: dict[str, object]) -> None:
    found = read_row(kind, {**row(kind, number), **changes}, Reading(), 1)
    assert isinstance(found, (Task, Rejected))
    if isinstance(found, Task):
        assert isinstance(found.tests, AssertTests) or found.tests.cases
        assert found.tests.code.strip() if isinstance(found.tests, AssertTests) else True
