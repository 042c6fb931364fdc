"""The `rlvr` command: thin, no logic."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from engine import recipe_file
from engine.errors import InputError, RunError
from sandbox import SandboxError


@click.group()
@click.version_option(package_name="rlvr")
def commands() -> None:
    """GRPO with verifiable rewards on code: sample with vLLM, judge in nsjail, train a LoRA, sync in place."""


@commands.command()
@click.argument("recipe_path", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="a.b=value", help="Override a key; may be repeated.")
@click.option("--max-steps", type=click.IntRange(min=1), help="Train this many steps instead of run.steps.")
@click.option("--output", metavar="DIR", help="The run's folder; it must be new or empty.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the resolved recipe and stop.")
def run(
    recipe_path: Path, overrides: tuple[str, ...], max_steps: int | None, output: str | None, dry_run: bool
) -> None:
    """Train as RECIPE says."""
    if max_steps is not None:
        overrides = (*overrides, f"run.steps={max_steps}")
    recipe = recipe_file.load(recipe_path, overrides)
    from engine.start import check, start

    if dry_run:
        check(recipe)
        click.echo(recipe_file.dump(recipe))
        return
    signal.signal(signal.SIGTERM, _terminate)
    start(recipe, output)


@commands.command()
def doctor() -> None:
    """Check this machine: packages, sandbox, memory, disk."""
    from engine.preflight import preflight

    failed = 0
    for check in preflight(None):
        failed += not check.ok
        click.echo(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
    sys.exit(1 if failed else 0)


@commands.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), help="Which step; the newest if left out.")
def show(run_path: Path, step: int | None) -> None:
    """Print the prompts, completions, verdicts, rewards and advantages of a step of RUN."""
    from engine.record.show import show as show_step

    show_step(run_path, step)


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


# Threads that wait must sleep: sampler and trainer share the cores. Read by libgomp when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
