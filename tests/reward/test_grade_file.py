# ruff: noqa: E501  (answers as one-line strings)
"""`rlvr grade` without the command: lines in, lines out, in order, whatever the lines are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.reward.grade_file import MalformedLine, grade_file, parse_item

ROOT = Path(__file__).resolve().parents[2]
STDIN = {
    "kind": "stdin",
    "cases": [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}],
    "compare": "lines",
}
CALL = {"kind": "call", "entry_point": "f", "cases": [{"args": [41], "result": 42}]}
ASSERT = {"kind": "assert", "entry_point": "f", "code": "assert f(1) == 2"}
INC = "print(int(input()) + 1)"


def grade(tmp_path: Path, lines: list[object], **settings: Any) -> list[dict[str, Any]]:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    summary = grade_file(source, out, 2, **settings)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert summary.lines == len(rows)
    assert sum(summary.verdicts.values()) == len(rows)
    return rows


def test_a_file_of_all_kinds(tmp_path: Path) -> None:
    rows = grade(
        tmp_path,
        [
            {"id": 1, "completion": f"So:\n```python\n{INC}\n```\n", "tests": STDIN},
            {"id": "two", "program": "print(2)", "tests": STDIN},
            {"id": 3, "completion": "I cannot.", "tests": STDIN},
            "this is not JSON",
            "",
            {"id": 5, "program": "def f(x): return x + 1", "tests": CALL},
            {
                "id": 6,
                "program": "def f(x): return x + 1",
                "tests": ASSERT,
                "limits": {"cpu_seconds": 1, "memory_mb": 128},
            },
            {"id": 7, "program": INC, "tests": {"kind": "stdin", "cases": []}},
            {"id": 8, "program": INC, "tests": {"kind": "magic"}},
            {"id": 9, "program": "while 1: pass", "tests": STDIN, "limits": {"cpu_seconds": 0.3}},
            {"program": INC, "tests": STDIN},
        ],
    )
    assert [(row["id"], row["verdict"]) for row in rows] == [
        (1, "AC"), ("two", "WA"), (3, "NO_CODE"), (None, "INFRA"), (5, "AC"),
        (6, "AC"), (7, "INFRA"), (8, "INFRA"), (9, "TLE"), (None, "AC"),
    ]  # fmt: skip
    assert [set(row) for row in rows] == [{"id", "verdict", "passed", "total", "cases", "detail", "soft"}] * len(rows)
    assert (rows[0]["passed"], rows[0]["total"]) == (2, 2)
    assert (rows[1]["passed"], rows[1]["total"], len(rows[1]["cases"])) == (1, 2, 2)
    assert set(rows[0]["cases"][0]) == {"verdict", "cpu_seconds", "wall_seconds"}
    assert "line 4" in rows[3]["detail"]
    assert "magic" in rows[7]["detail"]


def test_order_is_kept_when_later_lines_are_faster(tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(0.4)\n" + INC
    rows = grade(tmp_path, [{"id": n, "program": slow if n % 5 == 0 else INC, "tests": STDIN} for n in range(15)])
    assert [row["id"] for row in rows] == list(range(15))
    assert {row["verdict"] for row in rows} == {"AC"}


def test_every_case_is_run_where_partial_credit_is_asked(tmp_path: Path) -> None:
    line = {"id": 1, "program": "print(6)", "tests": STDIN}
    (row,) = grade(tmp_path, [line], stop_at_first_failure=False)
    assert (row["verdict"], row["passed"], len(row["cases"])) == ("WA", 1, 2)


def good(**changes: object) -> dict[str, object]:
    return {"id": 1, "program": INC, "tests": STDIN, **changes}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ([], "object"),
        ({"id": 1}, "exactly one"),
        (good(completion="x"), "exactly one"),
        (good(program=3), "text"),
        (good(extra=1), "extra"),
        (good(tests=None), "tests.kind"),
        (good(tests={"kind": "stdin"}), "cases"),
        (good(tests={"kind": "stdin", "cases": [{"input": "x"}]}), "output"),
        (good(tests={"kind": "stdin", "cases": [{"input": "x", "output": 3}]}), "text"),
        (good(tests={**STDIN, "compare": "loose"}), "loose"),
        (good(tests={"kind": "call", "entry_point": "f", "cases": [{"args": 3, "result": 1}]}), "list"),
        (good(tests={"kind": "call", "entry_point": "f", "cases": [{"args": [3]}]}), "result"),
        (good(tests={"kind": "assert", "entry_point": "f"}), "code"),
        (good(limits={"cpu_second": 1}), "cpu_second"),
        (good(limits={"cpu_seconds": 0}), "positive"),
        (good(limits={"cpu_seconds": float("nan")}), "positive"),
        (good(limits={"memory_mb": 1.5}), "whole"),
        (good(limits={"memory_mb": True}), "whole"),
    ],
)
def test_a_malformed_line_has_a_reason(line: object, reason: str) -> None:
    with pytest.raises(MalformedLine, match=reason):
        parse_item(line)


def test_it_imports_without_torch() -> None:
    code = "import sys, engine.reward.grade_file\nprint([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
