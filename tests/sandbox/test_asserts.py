# ruff: noqa: E501  (programs as one-line strings)
"""Test code: read as call cases where that is exact, run in a jail of its own otherwise."""

from __future__ import annotations

import pytest

from sandbox import AssertTests
from sandbox.assert_convert import convert, holds
from tests.sandbox.conftest import Bench

RPC = "import random\n"  # anything imported keeps test code from being read as call cases


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("assert f(1) == 2", 1),
        ("assert f(1) == 2, 'message'\nassert f(2) == 3", 2),
        ("assert not f(1)", 1),
        ("assert f(1) is None", 1),
        ("assert f(-1.5, key='x') != [1, (2, {'a': None})]", 1),
        ("assert abs(f(1) - 0.5) < 1e-6", 1),
        ("import math\nassert math.isclose(f(1), 0.5, rel_tol=1e-9)", 1),
        ("assert sorted(f([3, 1])) == [1, 3]", 1),
        ("assert f(*[1, 2]) in (3, 4)", 1),
        ("assert len(f([0] * 100)) == 10 ** 2", 1),
        ("METADATA = {'a': 1}\ndef check(candidate):\n    assert candidate(1) == 2\ncheck(f)", 1),
        ("def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3", 2),
        (
            "from solution import f\ndef test_a():\n    x = [1, 2]\n    assert f(x) == 3\ndef test_b():\n    assert f([]) == 0",
            2,
        ),
        ("for x, y in [(1, 2), (3, 4)]:\n    assert f(x) == y", 2),
        ("for i in range(3):\n    assert f(i) == i + 1", 3),
    ],
)
def test_what_is_read_as_call_cases(code: str, count: int) -> None:
    cases = convert(code, "f")
    assert cases is not None
    assert len(cases) == count


@pytest.mark.parametrize(
    "code",
    [
        "",
        "pass",
        "assert True",
        "assert f(1) == f(2)",
        "assert f(f(1)) == 2",
        "assert f(g(1)) == 2",
        "assert f(lambda x: x) == 2",
        "x = f(1)\nassert x == 2",
        "a = [1]\nf(a)\nassert a == [1]",
        "import os\nassert f(1) == 2",
        "assert f(10 ** 10 ** 10) == 2",
        "assert f([0] * 10 ** 9) == 2",
        "assert [0] * f(1) == []",
        "assert range(f(1)) == []",
        "assert f(1).x == 2",
        "assert eval(f(1))",
        "def f(x): return 2\nassert f(1) == 2",
        "f = len\nassert f([]) == 0",
        "def test_a(fixture):\n    assert f(1) == 2",
        "class TestA:\n    def test_a(self):\n        assert f(1) == 2",
        "try:\n    assert f(1) == 2\nexcept ValueError:\n    pass",
        "while True:\n    assert f(1) == 2",
        "for i in range(10 ** 9):\n    assert f(i) == 2",
        "assert f(1) == 2\nimport sys; sys.exit(0)",
        "assert f(1) is 2",
    ],
)
def test_what_is_left_as_it_is(code: str) -> None:
    assert convert(code, "f") is None


@pytest.mark.parametrize(
    ("code", "result", "true"),
    [
        ("assert f(1) == (1, 2)", [1, 2], False),
        ("assert f(1) == [1, 2]", [1, 2], True),
        ("assert f(1) == 1", True, True),
        ("assert f(1) is True", 1, False),
        ("assert f(1) == 0.3", 0.1 + 0.2, False),
        ("assert abs(f(1) - 0.3) < 1e-6", 0.1 + 0.2, True),
        ("assert abs(f(1) - 0.3) < 1e-6", "x", False),
        ("assert abs(f(1) - 0.3) < 1e-6", float("nan"), False),
        ("assert f(1)[0] == 1", [], False),
        ("assert f(1)['a'] == 1", {"a": 1}, True),
        ("assert set(f(1)) == {1}", [1, 1], True),
        ("assert isinstance(f(1), int)", 3, True),
        ("assert f(1) in [1, 2] and True", 2, True),
        ("assert f(1) > 0 or False", None, False),
        ("assert 1 <= f(1) < 3", 2, True),
        ("assert sum(f(1)) == 3", [1, 2], True),
        ("assert sum(f(1)) == 3", ["a"], False),
        ("assert not f(1)", [], True),
    ],
)
def test_what_an_assertion_says_of_a_result(code: str, result: object, true: bool) -> None:
    cases = convert(code, "f")
    assert cases is not None
    assert holds(cases[0], result) == true


@pytest.mark.parametrize(
    ("entry_point", "program", "code", "verdict"),
    [
        ("f", "def f(x): return x + 1", RPC + "assert f(1) == 2", "AC"),
        ("f", "def f(x): return x", RPC + "assert f(1) == 2", "WA"),
        ("f", "def f(a): a.sort()", "def test_b():\n    a=[3,1]; f(a)\n    assert a==[1,3]", "AC"),
        ("f", "def f(a): a.clear()", "def test_b():\n    a={1: 2}; f(a)\n    assert a=={}", "AC"),
        ("f", "def f(x): raise ValueError('no')", "import pytest\ndef test():\n    with pytest.raises(ValueError, match='no'):\n        f(1)", "AC"),
        ("f", "def f(x): raise ValueError('yes')", "import pytest\ndef test():\n    with pytest.raises(ValueError, match='no'):\n        f(1)", "WA"),
        ("f", "def f(x): return 1", "import pytest\ndef test():\n    with pytest.raises(ValueError):\n        f(1)", "WA"),
        ("f", "class E(Exception): pass\ndef f(x): raise E('a')", "import pytest\nfrom solution import f, E\ndef test():\n    with pytest.raises(E):\n        f(1)", "AC"),
        ("f", "def f(x): return 0.1+0.2", "import pytest\ndef test():\n    assert f(1) == pytest.approx(0.3)", "AC"),
        ("f", "def f(x): return x+1", "import pytest\n@pytest.mark.parametrize('a,b', [(1, 2), (3, 4)])\ndef test(a, b):\n    assert f(a) == b", "AC"),
        ("f", "def f(x):\n yield x\n yield 2", RPC + "assert list(f(1)) == [1, 2]", "AC"),
        ("f", "import unittest\ndef f(x): return x+1", "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1), 2)", "AC"),
        (
            "Stack",
            "class Stack:\n  def __init__(self): self.items=[]\n  def push(self, x): self.items.append(x)\n  def pop(self): return self.items.pop()\n"
            "  def __len__(self): return len(self.items)\n  def __contains__(self, x): return x in self.items\n  def __getitem__(self, i): return self.items[i]",
            "from solution import Stack\ndef test():\n    s = Stack(); s.push(1); s.push([2])\n    assert len(s) == 2 and 1 in s and s[0] == 1\n"
            "    assert s.pop() == [2] and s.items == [1]\n    assert isinstance(s, Stack)",
            "AC",
        ),
        ("f", "import time\ndef f(x): time.sleep(99)", RPC + "assert f(1) == 2", "TLE"),
        ("f", "def f(x):\n while True: pass", RPC + "assert f(1) == 2", "TLE"),
        ("f", "def f(x):\n a=[0]\n while True: a=a+a", RPC + "assert f(1) == 2", "MLE"),
        ("f", "1/0", RPC + "assert f(1) == 2", "RE"),
        ("f", "def f(x): return (", RPC + "assert f(1) == 2", "CE"),
        ("f", "def g(x): return 2", RPC + "assert f(1) == 2", "WA"),
        ("f", "class Solution:\n def f(self, x): return x+1", RPC + "assert f(1) == 2", "AC"),
    ],
)  # fmt: skip
def test_two_jails(bench: Bench, entry_point: str, program: str, code: str, verdict: str) -> None:
    got = bench.grade(program, AssertTests(entry_point, code))
    assert (got.verdict, got.soft) == (verdict, False), got
    assert bench.inmates() == bench.expected_inmates()


@pytest.mark.parametrize(
    ("body", "verdict"), [("return g(x)", "AC"), ("return 4", "WA"), ("import os; os._exit(0)", "RE")]
)
def test_tests_that_pass_a_function_share_an_interpreter_and_say_so(bench: Bench, body: str, verdict: str) -> None:
    code = "def test():\n    assert apply(lambda v: v + 1, 2) == 3"
    got = bench.grade(f"def apply(g, x): {body}", AssertTests("apply", code))
    assert (got.verdict, got.soft) == (verdict, True), got


def test_a_program_cannot_choose_to_share_an_interpreter(bench: Bench) -> None:
    for value in ("lambda: 1", "object()", "type('E', (int,), {})(3)", "print", "iter([])"):
        got = bench.grade(f"def f(x): return {value}", AssertTests("f", RPC + "assert f(f(1)) == 2"))
        assert (got.verdict, got.soft) == ("WA", False), got
