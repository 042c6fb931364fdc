"""`rlvr eval` on a run of a tiny model: it hears what the run's own evaluations heard, and goes on where it was."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.cli import commands
from engine.errors import InputError
from engine.preflight import require_devices
from engine.subject import find_subject
from tests.small import finish, make_model, start, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("evaluated")
    model = make_model(folder / "model")
    recipe = write_recipe(folder / "recipe.toml", model, run_steps=6, eval_every=0, optim_lr=5e-2)
    code, out, errors = finish(start(recipe, folder / "run"))
    assert code == 0, (out, errors)
    return folder / "run"


def rlvr(*words: object) -> Result:
    return CliRunner().invoke(commands, list(map(str, words)))


def heard(run: Path, when: str) -> dict[tuple[str, int], str]:
    """The answers that a run's own evaluation got."""
    with gzip.open(run / "rollouts" / f"heldout-{when}.jsonl.gz", "rt") as file:
        return {(row["task"], row["member"]): row["completion"] for row in map(json.loads, file)}


def kept(folder: Path) -> dict[tuple[str, int], str]:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return {(row["task_id"], row["sample"]): row["text"] for row in rows}


def test_base_and_end_of_a_run_are_what_the_run_heard_and_an_interrupted_evaluation_goes_on(run: Path) -> None:
    base, end = run / "eval" / "base", run / "eval" / "model"
    done = rlvr("eval", run, "--base")
    assert (done.exit_code, kept(base)) == (0, heard(run, "before")), done.output
    lines = (base / "results.jsonl").read_bytes().splitlines(keepends=True)
    (base / "results.jsonl").write_bytes(b"".join(lines[:-3]) + lines[-3][:20])
    done = rlvr("eval", run, "--base")
    assert (done.exit_code, kept(base)) == (0, heard(run, "before")), done.output

    done = rlvr("eval", run, "--baseline", base)
    assert (done.exit_code, kept(end)) == (0, heard(run, "after")), done.output
    assert kept(base) != kept(end)  # the adapter is there
    summary = json.loads((run / "summary.json").read_text())["heldout"]
    assert f"heldout: {summary['before']:.3f} -> {summary['after']:.3f}" in done.output
    assert "gains.svg" in (end / "report.md").read_text()
    assert rlvr("compare", base, end).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "7"], "there are"),
        (["--suite", "heldoot"], "heldoot"),
        (["--set", "rollout.temprature=1"], "temperature"),
        (["--baseline", "nowhere"], "no evaluation is there"),
        (["--recipe", "x.toml"], "has a recipe of its own"),
    ],
)
def test_bad_input_is_one_message(run: Path, words: list[str], said: str) -> None:
    done = rlvr("eval", run, *words, "--out", run / "eval" / "never")
    assert isinstance(done.exception, InputError)
    assert said in str(done.exception)
    assert not (run / "eval" / "never").exists()


def test_greedy_with_samples_and_steps_of_no_run_are_refused(run: Path) -> None:
    assert rlvr("eval", run, "--greedy", "--samples", "4").exit_code == 2
    done = rlvr("eval", run / "adapter", "--step", "1")
    assert "is no run" in str(done.exception)


def test_an_adapter_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "adapter", tmp_path / "adapter")
    info = json.loads((run / "adapter" / "training_info.json").read_text())
    (tmp_path / "adapter" / "training_info.json").write_text(json.dumps(info | {"base_model_sha256": "0" * 64}))
    with pytest.raises(InputError, match="another model"):
        find_subject(str(tmp_path / "adapter"), recipe=None, overrides=(), step=None, base=False, sha256="")


def test_a_run_over_several_machines_is_evaluated_on_this_one(run: Path) -> None:
    """So its devices are looked for here."""
    overrides = ("cluster.samplers=3", 'rollout.devices=["cuda:63"]')
    subject = find_subject(str(run), recipe=None, overrides=overrides, step=None, base=True, sha256="")
    assert subject.recipe.samplers == (("cuda:63",),)
    with pytest.raises(InputError, match="cuda:63"):
        require_devices(subject.recipe, for_training=False)
