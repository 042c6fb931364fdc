"""Our own rows: a task is written as a line of JSON and read again, the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.tasks import read_tasks
from engine.tasks.cases import Reading
from engine.tasks.own import read_own, row_of, write_own
from engine.types import Task
from sandbox import AssertTests, CallCase, CallTests, Limits, StdinCase, StdinTests

TEXT = st.text(st.characters(), max_size=20)
SOME = st.text(min_size=1, max_size=10)
KEYS = st.integers() | TEXT | st.tuples(st.integers()) | st.binary(max_size=5)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=6,
)
TESTS = (
    st.builds(
        StdinTests,
        st.lists(st.builds(StdinCase, TEXT, TEXT, st.lists(TEXT, max_size=2).map(tuple)), min_size=1, max_size=3).map(
            tuple
        ),
        st.sampled_from(["lines", "tokens", "exact"]),
        st.none() | TEXT,
    )
    | st.builds(
        CallTests,
        SOME,
        st.lists(st.builds(CallCase, st.lists(PLAIN, max_size=2).map(tuple), PLAIN), min_size=1, max_size=2).map(tuple),
    )
    | st.builds(AssertTests, SOME, SOME.filter(str.strip))
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": SOME, "content": TEXT}), min_size=1, max_size=2).map(tuple)
TASKS = st.builds(
    Task,
    id=SOME,
    prompt=SOME | MESSAGES,
    tests=TESTS,
    starter=TEXT,
    reference=st.none() | TEXT,
    source=TEXT,
    limits=st.none() | st.builds(Limits, cpu_seconds=st.floats(0.1, 9), wall_seconds=st.none() | st.floats(0.1, 9)),
)


@given(TASKS)
def test_a_task_is_read_as_it_was_written(task: Task) -> None:
    again = read_own(json.loads(json.dumps(row_of(task))), Reading())
    assert again == task
    assert json.dumps(row_of(again)) == json.dumps(row_of(task))  # 1, 1.0 and True are equal, but not the same


def test_a_file_is_written_whole_and_read_in_order(tmp_path: Path) -> None:
    big = CallTests("f", (CallCase((10**5000, {1, 2}), ("a", b"b", {3: None})),))
    tasks = [Task(f"t/{n}", "p\u2028\r\n", big, source="s/easy") for n in range(3)]
    write_own(tmp_path / "t.jsonl", tasks)
    assert list(read_tasks(f"file:{tmp_path / 't.jsonl'}").tasks) == tasks
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_equal_tasks_have_equal_rows_in_every_process() -> None:
    code = (
        "from engine.tasks.curate import task_hash; from engine.types import Task\n"
        "from sandbox import CallCase, CallTests\n"
        "print(task_hash(Task('t', 'p', CallTests('f', (CallCase(({'a', 'b', 'c', 'd'},), frozenset('efgh')),)))))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(hashes) == 1
