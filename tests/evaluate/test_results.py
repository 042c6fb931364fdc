"""Results on disk: what may go on in a folder, what may be compared, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.cli import commands
from engine.errors import InputError
from engine.evaluate import Protocol, Results, read_answers, read_protocol, suite_result
from engine.evaluate.compare import compare, dropped, table
from engine.evaluate.report import write_report
from engine.types import Answer, Task
from sandbox import StdinTests

PROTOCOL = Protocol(
    model={"name": "m", "source": "s", "sha256": "1", "adapter_sha256": None, "step": None},
    suites={"easy": {"source": "generated:train", "tasks": 2, "sha256": "2"}},
    settings={"samples": 2, "temperature": 0.7, "stop": ["\n"]},
)


def answer(task: str, sample: int, verdict: str = "AC", **changes: object) -> Answer:
    values: dict[str, object] = {
        "task_id": task, "sample": sample, "verdict": verdict, "passed": 0, "total": 1, "finish": "stop",
        "tokens": 3, "detail": "", "text": "\u2028print(1)\n",
    }  # fmt: skip
    return Answer(**(values | changes))  # type: ignore[arg-type]


def result(folder: Path, verdicts: dict[str, str], protocol: Protocol = PROTOCOL) -> Path:
    """A folder whose tasks have these verdicts, a letter an answer: y is AC, n is WA."""
    made = Results(folder, protocol)
    for task, letters in verdicts.items():
        for sample, letter in enumerate(letters):
            made.add("easy", answer(task, sample, "AC" if letter == "y" else "WA"))
    made.close()
    return folder


def named(name: str, **settings: object) -> Protocol:
    return replace(PROTOCOL, model={**PROTOCOL.model, "name": name}, settings={**PROTOCOL.settings, **settings})


def test_a_result_goes_on_where_it_was(tmp_path: Path) -> None:
    result(tmp_path / "r", {"a": "yn"})
    again = Results(tmp_path / "r", PROTOCOL)
    assert again.has("easy", "a", 1)
    assert not again.has("easy", "b", 0)
    again.add("easy", answer("b", 0))
    again.close()
    assert read_answers(tmp_path / "r")["easy"] == [answer("a", 0), answer("a", 1, "WA"), answer("b", 0)]


def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    folder = result(tmp_path / "r", {"a": "yy"})
    lines = folder / "results.jsonl"
    lines.write_bytes(lines.read_bytes()[:-10])
    again = Results(folder, PROTOCOL)
    assert [again.has("easy", "a", sample) for sample in (0, 1)] == [True, False]
    again.add("easy", answer("a", 1))
    again.close()
    assert len(read_answers(folder)["easy"]) == 2


def test_infra_is_no_answer(tmp_path: Path) -> None:
    made = Results(tmp_path / "r", PROTOCOL)
    made.add("easy", answer("a", 0, "INFRA"))
    assert not made.has("easy", "a", 0)
    made.close()


@pytest.mark.parametrize(
    ("protocol", "word"),
    [
        (named("m", temperature=1.0), r"settings\.temperature \(0\.7 there, 1\.0 now\)"),
        (named("m", stop=[]), r"settings\.stop"),
        (named("other"), r"model\.name"),
        (replace(PROTOCOL, suites={"easy": {**PROTOCOL.suites["easy"], "sha256": "3"}}), r"suites\.easy\.sha256"),
    ],
)
def test_settings_are_never_mixed_in_a_folder(tmp_path: Path, protocol: Protocol, word: str) -> None:
    folder = result(tmp_path / "r", {"a": "yy"})
    with pytest.raises(InputError, match=word):
        Results(folder, protocol)


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="holds something"):
        Results(tmp_path, PROTOCOL)
    with pytest.raises(InputError, match="no evaluation is there"):
        read_protocol(tmp_path)
    with pytest.raises(InputError, match="neither an evaluation nor a run"):
        compare([tmp_path])


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = result(tmp_path / "r", {"a": "yy"})
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"suite": "easy"}\n')
    with pytest.raises(InputError, match="line 3"):
        read_answers(folder)


def test_gains_against_the_first_and_their_mean(tmp_path: Path) -> None:
    base = result(tmp_path / "base", {"a": "ny", "b": "nn"}, named("base"))
    one = result(tmp_path / "one", {"a": "yy", "b": "nn"}, named("one"))
    two = result(tmp_path / "two", {"a": "yy", "b": "yy"}, named("two"))
    rows = compare([base, one, two])
    assert [(row.name, row.before, row.after, row.gain.mean) for row in rows] == [
        ("one", 0.25, 0.5, 0.25),
        ("two", 0.25, 1.0, 0.75),
    ]
    assert "| mean of 2 | easy | | 0.250 | 0.750 | +50.0 | from +25.0 to +75.0 |" in table(rows)
    assert dropped(compare([two, base]), 0.74)
    assert not dropped(compare([two, base]), 0.76)


def test_the_regression_gate_is_the_exit_code(tmp_path: Path) -> None:
    base = result(tmp_path / "base", {"a": "yy", "b": "yn"}, named("base"))
    worse = result(tmp_path / "worse", {"a": "yy", "b": "nn"}, named("worse"))
    run = CliRunner()
    done = run.invoke(commands, ["compare", str(base), str(worse), "--max-drop", "2"])
    assert (done.exit_code, "drops by 25.0 points on easy" in done.output) == (1, True)
    assert run.invoke(commands, ["compare", str(base), str(worse), "--max-drop", "30"]).exit_code == 0
    assert run.invoke(commands, ["compare", str(base), str(worse)]).exit_code == 0


def test_results_that_were_not_made_alike_are_not_compared(tmp_path: Path) -> None:
    base = result(tmp_path / "base", {"a": "yy"}, named("base"))
    with pytest.raises(InputError, match="temperature"):
        compare([base, result(tmp_path / "hot", {"a": "yy"}, named("hot", temperature=1.0))])
    with pytest.raises(InputError, match="different problems"):
        compare([base, result(tmp_path / "half", {"b": "yy"}, named("half"))])
    with pytest.raises(InputError, match="name another"):
        compare([base])


def test_runs_are_rows_of_their_own_beginning_and_end(tmp_path: Path) -> None:
    for seed, after in ((0, 0.5), (1, 0.7)):
        (tmp_path / f"run-{seed}").mkdir()
        suite = {"before": 0.1, "after": after, "gain": after - 0.1, "ci95": [0.2, 0.9], "tasks": 4}
        summary = {"name": "quick", "seed": seed, "suites": {"heldout": suite}}
        (tmp_path / f"run-{seed}" / "summary.json").write_text(json.dumps(summary))
    lines = table(compare([tmp_path / "run-0", tmp_path / "run-1"]))
    assert "| quick (seed 1) | heldout | 4 | 0.100 | 0.700 | +60.0 | [+20.0, +90.0] |" in lines
    assert lines[-1].startswith("| mean of 2 | heldout | | 0.100 | 0.600 | +50.0 |")


def test_the_report_has_the_suites_the_gains_and_a_plot(tmp_path: Path) -> None:
    base = result(tmp_path / "base", {"a": "ny", "b": "nn"}, named("base"))
    ours = result(tmp_path / "ours", {"a": "yy", "b": "nn"}, named("ours <&>"))
    tasks = [Task(name, "", StdinTests(()), source="s") for name in "ab"]
    found = suite_result("easy", tasks, read_answers(ours)["easy"])
    report = write_report(ours, read_protocol(ours), [found], compare([base, ours]), "base").read_text()
    assert "| easy | 2 | 4 | 0.500 | 0.500 | 0.500 | 0.000 | 0.000 | 0.000 | 0.000 | 3 |" in report
    assert "| ours <&> | easy | 2 | 0.250 | 0.500 | +25.0 |" in report
    assert "![gains](gains.svg)" in report
    import xml.etree.ElementTree as xml

    assert xml.parse(ours / "gains.svg").getroot().tag.endswith("svg")
