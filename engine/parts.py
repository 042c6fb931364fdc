"""The stages of a run, opened together, and the moves between them that the loop is made of."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from transformers import AutoTokenizer

from engine import resume
from engine.errors import InputError
from engine.evaluate import answer_of, suite_result
from engine.fill import Round, fill_batch
from engine.pipeline import Ahead, Finished, Pipeline
from engine.place import open_grader, open_samplers, open_tensors
from engine.recipe import Recipe
from engine.record import Console, RunFolder, checkpoint
from engine.record.checkpoint import Saved
from engine.record.export import export_adapter, export_model
from engine.rollout import render_prompts
from engine.rollout.messages import Group, Sampling
from engine.snapshot import Snapshot
from engine.stop import Stopped
from engine.sync import Canary
from engine.tasks import Curriculum, load_tasks
from engine.train import Trainer
from engine.train.ranks import ALONE, Ranks
from engine.types import Completion, Graded, Sampled, StepStats, SuiteResult, Task

CANARY_TOKENS = 32


class Parts:
    """The stages of one run, opened together and closed together."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        snapshot: Snapshot,
        cores: int,
        stack: ExitStack,
        say: Callable[[str], object],
        saved: Saved | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """say: takes lines for a person. saved: the checkpoint to go on from; the first step is else 1. ranks: this
        trainer among the others."""
        done = saved.step if saved else 0
        self.recipe = recipe
        self.snapshot = snapshot
        train = load_tasks(recipe.tasks.train)
        self.suites = {name: load_tasks(source) for name, source in recipe.tasks.heldout.items()}
        self.tasks = _by_id([train, *self.suites.values()])
        self.curriculum = Curriculum(train, recipe.run.seed)
        records = resume.records_of(saved.values) if saved else None
        self.record = stack.enter_context(
            closing(RunFolder(folder, recipe, snapshot, {"train": train, **self.suites}, records))
        )
        self.samplers = stack.enter_context(closing(open_samplers(recipe, snapshot, folder, cores, say)))
        self.grader = stack.enter_context(closing(open_grader(recipe, say)))
        self.trainer = Trainer(recipe, snapshot.folder, stack.enter_context(ranks))
        self.trainer.require_room()
        tokenizer = AutoTokenizer.from_pretrained(snapshot.folder, local_files_only=True)
        everything = list(self.tasks.values())
        prompts = render_prompts(everything, tokenizer, recipe.tasks, recipe.rollout.max_prompt_tokens)
        self.prompts = {task.id: prompt for task, prompt in zip(everything, prompts, strict=True)}
        # One for each sampler: a canary remembers what it heard before.
        ids = self.prompts[train[0].id].ids[-CANARY_TOKENS:]
        self.canaries = [Canary(ids, recipe.sync.tolerance) for _ in recipe.samplers]
        trained = self.trainer.policy.trained
        shapes = {name: tuple(t.shape for t in tensors) for name, tensors in trained.tensors().items()}
        self.sent = stack.enter_context(closing(open_tensors(recipe, shapes, trained.scale)))
        self.groups = 0
        """Submitted so far; every group has its own number."""
        self.before: dict[str, SuiteResult] = {}
        """Each suite's result before the first step."""
        self.flying: dict[Future[Finished], Task] = {}
        """Of the groups that are sampled ahead of training, also when they are finished but not yet taken."""
        self.pipeline = stack.enter_context(closing(Pipeline(self.samplers, self._grade)))
        self.ahead = Ahead(
            self._submit_ahead,
            per_step=recipe.rollout.prompts_per_step,
            steps=recipe.run.steps,
            max_lag=recipe.rollout.max_lag,
            extra=recipe.rollout.oversample,
            version=done,
        )
        if saved:
            resume.restore(self, saved)
        self._saved = done
        self._looked, self._busy = time.monotonic(), 0.0
        self.samplers.wait_ready()
        self.samplers.bind(self.sent)
        self.sync(version=done, changed=False)

    def sample_step(self, step: int, seconds: dict[str, float]) -> Sampled:
        """The groups of a step; those without a signal are replaced as far as the recipe says."""
        rollout, version = self.recipe.rollout, step - 1

        def sample(count: int, rounds: int) -> Round:
            if rollout.max_lag == 0:
                purpose = f"step-{step}-refill-{rounds}" if rounds else f"step-{step}"
                groups = self.sample_and_grade(self.curriculum.take(count), rollout.group_size, purpose, seconds)
            else:
                if rounds:
                    self.ahead.discard(count)  # groups without a signal give up their places
                start = time.monotonic()
                groups = _noted(self.ahead.take(count, version), start, seconds)
            return groups, self.trainer.advantages(groups)

        wanted, extra = rollout.prompts_per_step, rollout.oversample
        sampled = fill_batch(sample, wanted, version=version, oversample=extra, refill=rollout.refill)
        self.ahead.discard(extra)
        return sampled

    def train(self, sampled: Sampled, step: int) -> StepStats:
        """One step on the groups that make up the batch."""
        groups, advantages = sampled.groups, sampled.advantages
        return self.trainer.step([groups[i] for i in sampled.trained], [advantages[i] for i in sampled.trained], step)

    def sample_and_grade(
        self, tasks: Sequence[Task], samples: int, purpose: str, seconds: dict[str, float]
    ) -> list[list[Graded]]:
        """`samples` answers to each task, graded as they land; one group a task, in the tasks' order."""
        start = time.monotonic()
        futures = self._submit(tasks, samples, purpose)
        return _noted([future.result() for future in futures], start, seconds)

    def _submit(self, tasks: Sequence[Task], samples: int, purpose: str) -> list[Future[Finished]]:
        rollout, seed = self.recipe.rollout, self.recipe.run.seed
        first = self.groups
        self.groups += len(tasks)
        sampling = Sampling(
            rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.stop
        )
        return self.pipeline.submit(
            [
                Group(
                    group=first + index,
                    task_id=task.id,
                    prompt_ids=self.prompts[task.id].ids,
                    seeds=tuple(seed_of(seed, purpose, index, member) for member in range(samples)),
                    sampling=sampling,
                )
                for index, task in enumerate(tasks)
            ]
        )

    def _submit_ahead(self, count: int) -> list[Future[Finished]]:
        purpose = f"ahead-{self.groups}"
        tasks = self.curriculum.take(count)
        futures = self._submit(tasks, self.recipe.rollout.group_size, purpose)
        untaken = {future: self.flying[future] for future in self.ahead.untaken}
        self.flying = untaken | dict(zip(futures, tasks, strict=True))
        return futures

    def _grade(self, completion: Completion) -> Future[Graded]:
        task = completion.task_id
        return self.grader.submit(self.tasks[task], completion, self.prompts[task].opening)

    def sync(self, *, version: int, changed: bool) -> float:
        """Install what is trained in every sampler and prove it; the canaries' largest difference in nats."""
        self.samplers.install(version, self.trainer.policy.trained.tensors())
        ids = self.canaries[0].token_ids
        trainer = self.trainer.score(ids)

        def check(number: int, heard: tuple[float, ...]) -> float:
            return self.canaries[number].check(trainer, heard, version=version, changed=changed)

        return self.samplers.prove(ids, check)

    def counters(self) -> dict[str, float]:
        """What went wrong and was mended so far, and how idle the samplers were since the last call; by metric name."""
        samplers = self.samplers.stats()
        now, busy = time.monotonic(), sum(s.busy_seconds for s in samplers)
        idle = 1 - (busy - self._busy) / (now - self._looked) / len(samplers)
        self._looked, self._busy = now, busy
        return {
            "groups/too_old": float(self.ahead.too_old),
            "perf/sampler_idle_share": idle,
            "perf/sampler_restarts": float(sum(s.restarts for s in samplers)),
            "perf/resampled": float(sum(s.resampled for s in samplers)),
            "perf/sandbox_retries": float(self.grader.infra_retries),
        }

    def export(self, step: int, folder: Path | None = None) -> Path:
        """Write what was trained into `adapter` or `model` of a folder, the run's if None; where it went."""
        policy, lora, into = self.trainer.policy, self.recipe.lora, folder or self.record.path
        if lora is None:
            return export_model(into / "model", policy.model, self.snapshot, step)
        return export_adapter(into / "adapter", policy.adapter.factors(), lora, self.snapshot, step)

    def save(self, step: int) -> Path:
        """A checkpoint after `step`, unless there is one; where it is."""
        root, rules = self.record.path / "checkpoints", self.recipe.checkpoint
        if step != self._saved:
            values = resume.values_of(self, step)
            checkpoint.save(root, step, self.trainer.state(), values, lambda folder: self.export(step, folder))
            checkpoint.prune(root, rules.keep, rules.keep_every)
            self._saved = step
        return root / f"step-{step:06d}"

    def evaluate_if_due(self, console: Console, step: int) -> None:
        """What stands between `step` and the next: the evaluation before the first step, or one on the way."""
        every = self.recipe.eval.every
        if step == 0:
            self.before = self.evaluate(console, "before")
        elif every and step % every == 0:
            self.evaluate(console, f"step {step}")

    def evaluate(self, console: Console, when: str) -> dict[str, SuiteResult]:
        """Every held-out suite under the present weights; the same seeds each time, so that runs pair.

        One that is given up in the middle leaves nothing behind but the suites that were finished.
        """
        groups = self.groups
        try:
            return self._evaluate(console, when)
        except Stopped:
            self.pipeline.abort()
            self.groups = groups
            raise

    def _evaluate(self, console: Console, when: str) -> dict[str, SuiteResult]:
        results = {}
        samples = self.recipe.eval.samples
        # All are asked at once: the last answers of a suite alone would leave a sampler half empty.
        asked = {name: self._submit(tasks, samples, f"eval-{name}") for name, tasks in self.suites.items()}
        for name, tasks in self.suites.items():
            groups = [future.result().members for future in asked[name]]
            advantages = self.trainer.advantages(groups)
            self.record.rollouts(f"{name}-{when.replace(' ', '-')}", Sampled(groups, advantages, (), 1, 0), self.tasks)
            results[name] = suite_result(name, tasks, [answer_of(item) for group in groups for item in group])
            console.suite(results[name], when)
        return results


def _by_id(sets: Sequence[Sequence[Task]]) -> dict[str, Task]:
    """Every task by its id. Raises InputError where two sets have different tasks under one."""
    found: dict[str, Task] = {}
    for task in (task for tasks in sets for task in tasks):
        if found.setdefault(task.id, task) != task:
            raise InputError(f"task {task.id} stands in two sets with different tests or prompts; give them other ids")
    return found


def seed_of(*parts: object) -> int:
    """A 32-bit seed that depends on every part and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def _noted(finished: Sequence[Finished], start: float, seconds: dict[str, float]) -> list[list[Graded]]:
    """The groups; notes what was waited for since `start`: the last answer, and then the rest of the grading."""
    now = time.monotonic()
    landed = min(now, max(start, *(group.landed for group in finished)))
    for phase, took in (("sample", landed - start), ("grade", now - landed)):
        seconds[phase] = seconds.get(phase, 0.0) + took
    return [group.members for group in finished]


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the wall seconds that the context took to those of `phase`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
