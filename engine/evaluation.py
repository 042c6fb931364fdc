"""`rlvr eval`: a model sampled by vLLM and judged in the jails, into a folder that a later run can go on with."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from transformers import AutoTokenizer

from engine.errors import InputError, RunError
from engine.evaluate import Protocol, Results, answer_of, interval, read_protocol, suite_result
from engine.evaluate.compare import Row, against
from engine.evaluate.report import write_report
from engine.parts import seed_of
from engine.pipeline import Pipeline
from engine.place import open_samplers
from engine.preflight import require_devices
from engine.recipe import Recipe, Tasks
from engine.record.manifest import hash_tasks
from engine.record.trained import by_base_names, outline
from engine.reward import Grader
from engine.rollout import Samplers, render_prompts
from engine.rollout.messages import Group, Sampling
from engine.subject import Subject
from engine.sync import SharedTensors
from engine.tasks import load_tasks
from engine.types import Completion, Graded, Prompt, SuiteResult, Task


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation came to."""

    results: tuple[SuiteResult, ...]
    rows: tuple[Row, ...]
    """Against the baseline, if there is one."""
    report: Path


@dataclass(frozen=True, slots=True)
class Suite:
    """Tasks, how they are prompted, and where they came from."""

    name: str
    source: str
    tasks: Sequence[Task]
    how: Tasks


def find_suites(recipe: Recipe, names: Sequence[str]) -> list[Suite]:
    """The suites by name: of the recipe's `tasks.heldout`, or any task source; without names all held-out ones.

    A source that is no held-out suite of the recipe is asked as a chat, or, where its tasks are to be continued,
    raw. Raises InputError where there is none.
    """
    heldout = recipe.tasks.heldout
    if not names and not heldout:
        raise InputError("no suite: the recipe has no tasks.heldout, so name one with --suite, such as humaneval")
    suites = []
    for name in names or heldout:
        source = heldout.get(name, name)
        tasks = load_tasks(source)
        how = recipe.tasks
        if name not in heldout:
            raw = any(task.starter for task in tasks)
            chat = how if how.prompt == "chat" else Tasks(train=source, prompt="chat")
            how = Tasks(train=source) if raw else chat
        suites.append(Suite(name, source, tasks, how))
    return suites


def evaluate(
    subject: Subject,
    suites: Sequence[Suite],
    *,
    samples: int,
    greedy: bool,
    baseline: Path | None,
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> Evaluated:
    """Sample and judge what `folder` does not hold yet, then summarise, compare and write the report.

    greedy: one answer of temperature 0 to each problem. progress: called with suite, answers there, answers wanted.
    Raises InputError for a folder or a baseline with other settings and prompts that don't fit, RunError where
    answers could not be judged.
    """
    recipe = subject.recipe
    wanted = 1 if greedy else samples
    rollout = recipe.rollout if not greedy else recipe.rollout.model_copy(update={"temperature": 0.0})
    tokenizer = AutoTokenizer.from_pretrained(subject.snapshot.folder, local_files_only=True)
    prompts = {s.name: render_prompts(s.tasks, tokenizer, s.how, rollout.max_prompt_tokens) for s in suites}
    protocol = Protocol(
        model=subject.identity(),
        suites={
            s.name: {"source": s.source, "tasks": len(s.tasks), "sha256": hash_tasks(s.tasks), "prompt": _asked(s.how)}
            for s in suites
        },
        settings={
            "samples": wanted,
            **{key: getattr(rollout, key) for key in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "dtype")},
            "stop": list(rollout.stop),
            "seed": recipe.run.seed,
            "require_thought": recipe.reward.require_thought,
            "sandbox": recipe.sandbox.model_dump(mode="json", exclude={"workers"}),
        },
    )
    if baseline is not None:
        read_protocol(baseline)  # not only at the end
    with closing(Results(folder, protocol)) as results:
        left = [suite for suite in suites if _missing(results, suite, wanted)]
        if left:
            sampling = Sampling(
                rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.stop
            )
            _answer(subject, left, prompts, sampling, wanted, results, progress)
        for suite in suites:
            if missing := _missing(results, suite, wanted):
                raise RunError(
                    f"suite {suite.name}: {len(missing)} answers could not be judged by the sandbox; the others are "
                    f"kept in {folder}: run the same command again"
                )
        found = tuple(suite_result(suite.name, suite.tasks, results.answers(suite.name)) for suite in suites)
    rows = tuple(against(baseline, folder)) if baseline is not None else ()
    report = write_report(folder, read_protocol(folder), found, rows, str(baseline))
    return Evaluated(found, rows, report)


def _missing(results: Results, suite: Suite, wanted: int) -> list[tuple[Task, int]]:
    return [(t, sample) for t in suite.tasks for sample in range(wanted) if not results.has(suite.name, t.id, sample)]


def _answer(
    subject: Subject,
    suites: Sequence[Suite],
    prompts: Mapping[str, Sequence[Prompt]],
    sampling: Sampling,
    wanted: int,
    results: Results,
    progress: Callable[[str, int, int], None],
) -> None:
    """Ask what is missing; every answer is kept as soon as its group is judged."""
    recipe = subject.recipe
    if subject.adapter is None:  # vLLM's LoRA layers are slow where there is nothing for them
        recipe = recipe.model_copy(update={"sync": recipe.sync.model_copy(update={"install": "merged"})})
    with ExitStack() as stack:
        samplers = stack.enter_context(
            closing(open_samplers(recipe, subject.snapshot, results.folder, len(os.sched_getaffinity(0))))
        )
        grader = stack.enter_context(closing(Grader(recipe.sandbox, recipe.reward)))
        samplers.wait_ready()
        if subject.adapter is not None:
            _install(samplers, subject, prompts[suites[0].name][0].ids, stack)
        asked = dict(
            enumerate(
                (suite, index, prompt)
                for suite in suites
                for index, (task, prompt) in enumerate(zip(suite.tasks, prompts[suite.name], strict=True))
                if any(not results.has(suite.name, task.id, sample) for sample in range(wanted))
            )
        )

        def grade(completion: Completion) -> Future[Graded]:
            suite, index, prompt = asked[completion.group]
            return grader.submit(suite.tasks[index], completion, prompt.opening)

        pipeline = stack.enter_context(closing(Pipeline(samplers, grade)))
        futures = pipeline.submit(
            [
                Group(
                    group=number,
                    task_id=suite.tasks[index].id,
                    prompt_ids=prompt.ids,
                    # A run's own: the same model gives the same answers as in its evaluations.
                    seeds=tuple(seed_of(recipe.run.seed, f"eval-{suite.name}", index, n) for n in range(wanted)),
                    sampling=sampling,
                )
                for number, (suite, index, prompt) in asked.items()
            ]
        )
        for future in as_completed(futures):
            for graded in future.result().members:
                suite = asked[graded.completion.group][0]
                if not results.has(suite.name, graded.completion.task_id, graded.completion.member):
                    results.add(suite.name, answer_of(graded))
            progress(suite.name, len(results.answers(suite.name)), len(suite.tasks) * wanted)


def _install(samplers: Samplers, subject: Subject, ids: tuple[int, ...], stack: ExitStack) -> None:
    """Install the adapter in every sampler. Raises RunError where that changes nothing of what they say."""
    adapter = subject.adapter
    assert adapter is not None
    factors = by_base_names(adapter, subject.snapshot, outline(subject.snapshot.folder))
    shapes = {name: (a.shape, b.shape) for name, (a, b) in factors.items()}
    shared = stack.enter_context(closing(SharedTensors(shapes, adapter.scale)))
    before = samplers.scores(ids)
    samplers.bind(shared)
    samplers.install(1, factors)
    trained = any(bool(b.any()) for _, b in factors.values())
    if trained and samplers.scores(ids) == before:
        raise RunError(
            f"{adapter.folder}: installing it changed no log-prob of {len(ids)} tokens: it has not been applied"
        )


def _asked(how: Tasks) -> dict[str, Any]:
    return {key: getattr(how, key) for key in ("prompt", "chat_template", "system", "suffix", "prefill")}


def run_evaluation(
    subject: Subject,
    names: Sequence[str],
    *,
    samples: int | None,
    greedy: bool,
    baseline: Path | None,
    out: Path | None,
) -> Evaluated:
    """What `rlvr eval` does: find the suites and the folder, evaluate, and say what came out."""
    recipe = subject.recipe
    require_devices(recipe, for_training=False)
    suites = find_suites(recipe, names)
    folder = out or default_folder(subject, names, greedy)

    def progress(suite: str, done: int, of: int) -> None:
        if sys.stderr.isatty() or done == of:
            end = "\r" if sys.stderr.isatty() and done < of else "\n"
            click.echo(f"{suite}: {done} of {of} answers judged{end}", err=True, nl=False)

    found = evaluate(
        subject,
        suites,
        samples=samples or recipe.eval.samples,
        greedy=greedy,
        baseline=baseline,
        folder=folder,
        progress=progress,
    )
    for result in found.results:
        own = interval(result.by_problem, resamples=recipe.eval.bootstrap)
        rates = ", ".join(f"{name} {rate:.3f}" for name, rate in result.pass_at.items())
        click.echo(
            f"{result.name}: {rates} [{own.low:.3f}, {own.high:.3f}] over {len(result.by_problem)} problems, "
            f"{result.truncated_share:.2f} truncated, {result.verdicts.get('NO_CODE', 0)} without a program"
        )
    for row in found.rows:
        click.echo(
            f"{row.suite}: {row.before:.3f} -> {row.after:.3f}, gain {row.gain.mean:+.3f} "
            f"[{row.gain.low:+.3f}, {row.gain.high:+.3f}]"
        )
    click.echo(f"report: {found.report}")
    return found


def default_folder(subject: Subject, names: Sequence[str], greedy: bool) -> Path:
    """Beside the run, or under eval/: a folder whose name says what was asked, so that settings don't meet."""
    parts = [subject.part, *names, *(["greedy"] if greedy else [])]
    home = subject.home / "eval" if subject.home else Path("eval") / _file_name(subject.name)
    return home / "-".join(map(_file_name, parts))


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-")
