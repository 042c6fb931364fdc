"""The `rlvr` command: thin, no logic."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from engine import recipe_file
from engine.errors import InputError, RunError
from engine.imports import WAITING
from sandbox import VERDICTS, SandboxError


@click.group()
@click.version_option(package_name="rlvr")
def commands() -> None:
    """GRPO with verifiable rewards on code: sample with vLLM, judge in nsjail, train a LoRA, sync in place."""


@commands.command()
@click.argument("recipe_path", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="a.b=value", help="Override a key; may be repeated.")
@click.option("--max-steps", type=click.IntRange(min=1), help="Train this many steps instead of run.steps.")
@click.option("--output", metavar="DIR", help="The run's folder; it must be new or empty, but for --resume.")
@click.option("--resume", is_flag=True, help="Go on with the run in --output from its newest whole checkpoint.")
@click.option("--allow-change", "allowed", multiple=True, metavar="KEY", help="May differ on --resume; repeatable.")
@click.option("--quiet", is_flag=True, help="Print no steps, only warnings and what came out; log.txt has all.")
@click.option(
    "--dry-run", is_flag=True, help="Print what the run would be: memory, tokens, downloads, the resolved recipe."
)
def run(
    recipe_path: Path, overrides: tuple[str, ...], max_steps: int | None, output: str | None, resume: bool,
    allowed: tuple[str, ...], quiet: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Train as RECIPE says.

    Ctrl-C once, or SIGTERM, finishes the step, saves a checkpoint and ends; Ctrl-C twice ends at once.
    """
    if max_steps is not None:
        overrides = (*overrides, f"run.steps={max_steps}")
    recipe = recipe_file.load(recipe_path, overrides)
    from engine.start import start

    if dry_run:
        from engine.dry_run import lines

        for line in lines(recipe):
            click.echo(line)
        return
    signal.signal(signal.SIGTERM, _terminate)
    start(recipe, output, resume=resume, allowed=allowed, quiet=quiet)


@commands.command()
@click.argument("recipe_path", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--samplers", type=click.IntRange(min=1), help="In the place of the recipe's.")
@click.option("--trainers", type=click.IntRange(min=1), help="In the place of the recipe's.")
@click.option("--gpu", metavar="NAME", help="Times by its data sheet: h100, h200, a100; h100 if there is no --from.")
@click.option("--from", "run", metavar="RUN", type=click.Path(path_type=Path), help="Take lengths and times of it.")
@click.option("--mean-tokens", type=float, help="Of a completion, where there is no --from.")
@click.option("--set", "overrides", multiple=True, metavar="a.b=value", help="Override a key; may be repeated.")
@click.option("--json", "out", type=click.Path(path_type=Path, dir_okay=False), help="Where the figures go too.")
def plan(recipe_path: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Predict the steps of RECIPE and what 2 to 1,024 GPUs would make of them, without a GPU."""
    from engine.dry_run import memory_lines
    from engine.plan import plan_lines

    recipe = recipe_file.load(recipe_path, overrides)
    for line in plan_lines(recipe, memory_lines(recipe), **options):
        click.echo(line)


@commands.command()
@click.argument("first", metavar="RECIPE", type=click.Path(path_type=Path))
@click.argument("second", metavar="RECIPE", type=click.Path(path_type=Path))
def diff(first: Path, second: Path) -> None:
    """Print the keys at which two recipes differ, a line each; a run's folder stands for its recipe."""
    a, b = (recipe_file.load(path / "recipe.toml" if path.is_dir() else path) for path in (first, second))
    for key, one, other in recipe_file.differences(a, b):
        click.echo(f"{key}: {one!r} -> {other!r}")


@commands.command()
@click.option("--cuda", is_flag=True, help="Try what a run does on GPUs, in two minutes: kernels, syncs, log-probs.")
def doctor(cuda: bool) -> None:
    """Check this machine: packages, sandbox, memory, disk; with --cuda its GPUs."""
    from engine.preflight import gpu_pair, preflight

    if cuda:
        devices = gpu_pair()
        from engine.doctor import examine

        bad = []
        for row in examine(*devices, "bfloat16"):
            click.echo(row.line())
            if not row.ok:
                bad.append(row.name)
        if bad:
            raise RunError(f"doctor: {', '.join(bad)} failed")
        return
    failed = 0
    for check in preflight(None):
        failed += not check.ok
        click.echo(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
    sys.exit(1 if failed else 0)


@commands.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), help="Which step; the newest if left out.")
@click.option("--task", metavar="PART", help="Only tasks whose name has this in it.")
@click.option("--verdict", type=click.Choice(VERDICTS), help="Only completions with this verdict.")
@click.option("--reward", metavar="LOW:HIGH", help="Only rewards from LOW to HIGH; either may be left out.")
@click.option("--side-by-side", is_flag=True, help="A group's completions beside each other, as they stand.")
def show(
    run_path: Path, step: int | None, task: str | None, verdict: str | None, reward: str | None, side_by_side: bool
) -> None:
    """Print the prompts, completions, verdicts, rewards and advantages of a step of RUN.

    Tokens that trainer and sampler disagree about are coloured: red where the trainer finds them less likely, blue
    where it finds them more likely.
    """
    from engine.record.show import Wanted, reward_range
    from engine.record.show import show as show_step

    low, high = reward_range(reward) if reward is not None else (None, None)
    show_step(run_path, step, Wanted(task or "", verdict, low, high), side_by_side=side_by_side)


@commands.command("ls")
@click.argument("root", metavar="FOLDER", default="runs", type=click.Path(path_type=Path))
def list_all(root: Path) -> None:
    """List the runs below FOLDER, runs/ if left out: state, steps, the newest reward and pass rate, held-out gain."""
    from engine.record.listing import list_runs

    found = list_runs(root)
    if not found:
        click.echo(f"{root}: no run is there")
        return
    width = max(len(run.name) for run in found)
    click.echo(f"{'run':{width}}  state    steps  reward   pass  held-out")
    for run in found:
        reward, rate = (f"{value:.3f}" if value is not None else "-" for value in (run.reward, run.pass_rate))
        heldout = f"{run.heldout[0]:.3f} -> {run.heldout[1]:.3f}" if run.heldout else "-"
        click.echo(f"{run.name:{width}}  {run.state:7}  {run.steps:5}  {reward:>6}  {rate:>5}  {heldout}")


@commands.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file; RUN/report.html if left out.")
@click.option("--completions", type=click.IntRange(min=1), default=2000, show_default=True, help="Rollouts in it.")
def report(run_path: Path, out: Path | None, completions: int) -> None:
    """Write RUN as one HTML file with curves, tasks and a browser of rollouts; it needs no network."""
    from engine.record.page import write_page

    path = write_page(run_path, out, completions)
    click.echo(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")


@commands.command()
@click.argument("file", metavar="FILE.jsonl", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--jobs", type=click.IntRange(min=1), help="Programs judged at once; every core if left out.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where the verdicts go, else stdout.")
@click.option("--all-cases", is_flag=True, help="Run every case of a program, also after one has failed.")
def grade(file: Path, jobs: int | None, out: Path | None, all_cases: bool) -> None:
    """Grade the completions in FILE.jsonl, a line each; needs no torch."""
    from engine.reward.grade_file import grade_file

    done = grade_file(file, out, jobs, stop_at_first_failure=not all_cases)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(done.verdicts.items()))
    click.echo(f"graded {done.lines} lines: {counts}; {done.soft} soft", err=True)


@commands.group()
def sandbox() -> None:
    """The jails that run programs."""


@sandbox.command("check")
def sandbox_check() -> None:
    """Prove each protection on this machine and run the four smokes."""
    from sandbox.selftest import selftest, smokes

    rows = [(row.ok, row.name, row.detail) for row in selftest().rows]
    rows += [(s.ok, f"smoke: {s.name}", f"{s.verdict} in {s.seconds:.2f} s") for s in smokes()]
    for ok, name, detail in rows:
        click.echo(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}")
    sys.exit(0 if all(ok for ok, _, _ in rows) else 1)


@commands.command("eval")
@click.argument("subject", metavar="MODEL-OR-RUN")
@click.option("--suite", "suites", multiple=True, metavar="NAME", help="A held-out suite of the recipe, or a source.")
@click.option("--samples", type=click.IntRange(min=1), help="Answers to each problem; eval.samples if left out.")
@click.option("--greedy", is_flag=True, help="One answer of temperature 0 to each problem.")
@click.option("--step", type=click.IntRange(min=1), help="A checkpoint of the run instead of its end.")
@click.option("--base", is_flag=True, help="The run's base model, under the run's settings: a baseline.")
@click.option("--recipe", "recipe_path", type=click.Path(path_type=Path), help="Settings for what is no run.")
@click.option("--set", "overrides", multiple=True, metavar="a.b=value", help="Override a key; may be repeated.")
@click.option("--sha256", default="", help="Of a pypi source's wheel.")
@click.option("--baseline", type=click.Path(path_type=Path, file_okay=False), help="An evaluation to compare with.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The result's folder.")
def evaluate(
    subject: str, suites: tuple[str, ...], samples: int | None, greedy: bool, step: int | None, base: bool,
    recipe_path: Path | None, overrides: tuple[str, ...], sha256: str, baseline: Path | None, out: Path | None,
) -> None:  # fmt: skip
    """Sample MODEL-OR-RUN with vLLM, judge in the jails, report; goes on where an earlier call was interrupted.

    MODEL-OR-RUN: a run's folder, an adapter's folder, or a model as recipes name it.
    """
    from engine.evaluation import run_evaluation
    from engine.subject import find_subject

    if greedy and samples not in (None, 1):
        raise click.UsageError("--greedy gives one answer to each problem: leave --samples out")
    signal.signal(signal.SIGTERM, _terminate)
    found = find_subject(subject, recipe=recipe_path, overrides=overrides, step=step, base=base, sha256=sha256)
    run_evaluation(found, suites, samples=samples, greedy=greedy, baseline=baseline, out=out)


@commands.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--max-drop", type=click.FloatRange(min=0), metavar="POINTS", help="Exit 1 if a suite drops by more.")
def compare(folders: tuple[Path, ...], max_drop: float | None) -> None:
    """One table over FOLDERS: evaluations against the first of them, runs against their own beginning."""
    from engine.evaluate.compare import compare as rows_of
    from engine.evaluate.compare import dropped, table

    rows = rows_of(folders)
    for line in table(rows):
        click.echo(line)
    lost = dropped(rows, max_drop / 100) if max_drop is not None else []
    for row in lost:
        said = f"{row.name} drops by {-100 * row.gain.mean:.1f} points on {row.suite}"
        click.echo(f"{said}, {max_drop:g} are allowed", err=True)
    sys.exit(1 if lost else 0)


@commands.group()
def tasks() -> None:
    """Task sets: look at them, keep those whose reference passes, split them."""


@tasks.command("show")
@click.argument("source")
@click.option("--count", type=click.IntRange(min=0), default=1, show_default=True, help="Tasks printed in full.")
def tasks_show(source: str, count: int) -> None:
    """Print what SOURCE holds: counts, what was rejected and why, the first tasks."""
    from engine.tasks.curate import show_lines

    for line in show_lines(source, count):
        click.echo(line)


@tasks.command("gold")
@click.argument("source")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where the kept tasks go, as JSON Lines.")
@click.option("--jobs", type=click.IntRange(min=1), help="Programs judged at once; every core if left out.")
@click.option("--cpu-seconds", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="For a case.")
@click.option("--memory-mb", type=click.IntRange(min=64), default=256, show_default=True)
@click.option("--numpy", is_flag=True, help="Programs may import NumPy.")
def tasks_gold(
    source: str, out: Path | None, jobs: int | None, cpu_seconds: float, memory_mb: int, numpy: bool
) -> None:
    """Run every reference of SOURCE twice in the jail; keep the tasks whose reference passes every case.

    With --out a run that was interrupted goes on where it was.
    """
    from engine.tasks.curate import gold_file
    from sandbox import Limits

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty() or done in (0, of) or done % 500 == 0:
            end = "\r" if sys.stderr.isatty() and done < of else "\n"
            click.echo(f"gold: {done} of {of} judged{end}", err=True, nl=False)

    limits = Limits(cpu_seconds=cpu_seconds, memory_mb=memory_mb)
    for line in gold_file(source, out, jobs=jobs, limits=limits, numpy=numpy, progress=progress).lines():
        click.echo(line)


@tasks.command("split")
@click.argument("source", metavar="FILE")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the parts.")
@click.option("--heldout", "parts", multiple=True, metavar="NAME=COUNT", help="A held-out part; may be repeated.")
@click.option("--train", type=click.IntRange(min=1), help="At most so many; all that are left if left out.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--threshold", type=click.FloatRange(0, 1, min_open=True), default=0.7, show_default=True)
@click.option("--against", multiple=True, metavar="SOURCE", help="A suite that nothing may share 8 words with.")
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A model's folder.")
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), help="Longer prompts go; needs --tokenizer.")
@click.option("--raw", is_flag=True, help="Count the prompt's text, not what the chat template makes of it.")
def tasks_split(
    source: str, out: Path, parts: tuple[str, ...], train: int | None, seed: int, threshold: float,
    against: tuple[str, ...], tokenizer: Path | None, max_prompt_tokens: int | None, raw: bool,
) -> None:  # fmt: skip
    """Split FILE, or any source, into held-out parts and a training part without near-duplicates of them."""
    from engine.tasks.curate import heldout_sizes, split_file
    from engine.tasks.filters import token_counter

    if (tokenizer is None) != (max_prompt_tokens is None):
        raise click.UsageError("--tokenizer and --max-prompt-tokens go together")
    lines = split_file(
        source,
        out,
        heldout_sizes(parts),
        train=train,
        seed=seed,
        threshold=threshold,
        against=against,
        count_tokens=token_counter(tokenizer, chat=not raw) if tokenizer is not None else None,
        max_tokens=max_prompt_tokens or 0,
    )
    for line in lines:
        click.echo(line)


@commands.command("export")
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--format", "form", required=True, metavar="peft|merged|sglang", help="Which programs are to load it.")
@click.option("--step", type=click.IntRange(min=1), help="A checkpoint's; the end of the run if left out.")
@click.option("--prefix", help="Of the layers: model.layers, or model.language_model.layers for a multimodal model.")
@click.option("--dtype", metavar="float32|bfloat16|float16", help="Of a merged model; the base's if left out.")
@click.option("--out", type=click.Path(path_type=Path), help="A new or empty folder; RUN/exports/... if left out.")
@click.option("--model", "source", metavar="SOURCE", help="Where the base model is now, if not where it was.")
@click.option("--any-base", is_flag=True, help="Take the base model although its hash is another one.")
def export_command(
    run_path: Path, form: str, step: int | None, prefix: str | None, dtype: str | None, out: Path | None,
    source: str | None, any_base: bool,
) -> None:  # fmt: skip
    """Write what RUN trained for PEFT and vLLM, as a merged model, or for SGLang. RUN may be an adapter's folder."""
    from engine.record.formats import export

    done = export(run_path, form, step=step, prefix=prefix, dtype=dtype, out=out, source=source, any_base=any_base)
    for line in (*done.lines, f"{form}: {done.folder}"):
        click.echo(line)


@commands.command("check")
@click.argument("run_path", metavar="ADAPTER|RUN", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), help="A checkpoint's; the end of the run if left out.")
@click.option("--model", "source", metavar="SOURCE", help="Where the base model is now, if not where it was.")
@click.option("--any-base", is_flag=True, help="Take the base model although its hash is another one.")
@click.option("--tasks", metavar="SOURCE", help="Score its prompts and references; a few built-in texts if left out.")
@click.option("--tokens", type=click.IntRange(min=2), default=512, show_default=True, help="At most, in all texts.")
@click.option("--device", default="cpu", show_default=True, help="Where vLLM and the trainer compute, in turn.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Of vLLM."
)
def check_command(
    run_path: Path, step: int | None, source: str | None, any_base: bool, tasks: str | None, tokens: int,
    device: str, dtype: str,
) -> None:  # fmt: skip
    """Compare log-probs that vLLM serves from an adapter's folder with the trainer's; exit 1 unless they agree."""
    from engine.check import check

    found = check(
        run_path, step=step, source=source, any_base=any_base, tasks=tasks, tokens=tokens, device=device, dtype=dtype
    )
    for line in found.lines():
        click.echo(line)
    if reason := found.failure():
        raise RunError(reason)
    click.echo("ok: what is served is what was trained")


def main() -> None:
    """Run a command; failures on purpose become one message and an exit code, 2 for bad input, 1 for a failed run."""
    try:
        commands(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except InputError as error:
        _fail(2, str(error))
    except (RunError, SandboxError, OSError) as error:
        _fail(1, f"{type(error).__name__}: {error}")
    except (KeyboardInterrupt, click.Abort):
        _fail(130, "interrupted; the sampler and every jail are closed")


def _fail(code: int, text: str) -> NoReturn:
    click.echo(f"rlvr: {text}", err=True)
    sys.exit(code)


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that no sampler and no jail outlives the trainer."""
    raise KeyboardInterrupt


for _name, _value in WAITING.items():
    os.environ.setdefault(_name, _value)
