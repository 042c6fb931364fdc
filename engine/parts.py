"""The stages of a run, opened together, and the moves between them that the loop is made of."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from transformers import AutoTokenizer

from engine.evaluate import suite_result
from engine.fill import Round, fill_batch
from engine.recipe import Recipe
from engine.record import Console, RunFolder
from engine.record.export import export_adapter, export_model
from engine.reward import Grader
from engine.rollout import Sampler, render_prompts
from engine.rollout.messages import Group, SamplerConfig, Sampling
from engine.snapshot import Snapshot
from engine.sync import Canary, SharedFactors
from engine.tasks import Curriculum, load_tasks
from engine.train import Trainer
from engine.types import Graded, Sampled, StepStats, SuiteResult, Task

CANARY_TOKENS = 32
MAX_SEQUENCES = 64
"""Completions that a CPU sampler decodes at once; more only queue."""


class Parts:
    """The stages of one run, opened together and closed together."""

    def __init__(self, recipe: Recipe, folder: Path, snapshot: Snapshot, cores: int, stack: ExitStack) -> None:
        self.recipe = recipe
        self.snapshot = snapshot
        train = load_tasks(recipe.tasks.train)
        self.suites = {name: load_tasks(source) for name, source in recipe.tasks.heldout.items()}
        self.tasks = {task.id: task for tasks in (train, *self.suites.values()) for task in tasks}
        self.curriculum = Curriculum(train, recipe.run.seed)
        self.record = stack.enter_context(closing(RunFolder(folder, recipe, snapshot, {"train": train, **self.suites})))
        self.sampler = stack.enter_context(
            closing(
                Sampler(
                    _sampler_config(recipe, snapshot),
                    threads=recipe.rollout.threads or cores,
                    log=folder / "sampler.log",
                )
            )
        )
        self.grader = stack.enter_context(closing(Grader(recipe.sandbox, recipe.reward)))
        self.trainer = Trainer(recipe, snapshot.folder)
        tokenizer = AutoTokenizer.from_pretrained(snapshot.folder, local_files_only=True)
        everything = list(self.tasks.values())
        prompts = render_prompts(
            everything,
            tokenizer,
            style=recipe.tasks.prompt,
            template=recipe.tasks.chat_template,
            limit=recipe.rollout.max_prompt_tokens,
        )
        self.prompts = {task.id: ids for task, ids in zip(everything, prompts, strict=True)}
        self.canary = Canary(self.prompts[train[0].id][-CANARY_TOKENS:], recipe.sync.tolerance)
        adapter = self.trainer.policy.adapter
        shapes = {name: (a.shape, b.shape) for name, (a, b) in adapter.factors().items()}
        self.factors = stack.enter_context(closing(SharedFactors(shapes, adapter.scale)))
        self._groups = 0
        self.sampler.wait_ready()
        self.sampler.bind(self.factors.address)
        self.sync(version=0, changed=False)

    def sample_step(self, step: int, seconds: dict[str, float]) -> Sampled:
        """The groups of a step; those without a signal are replaced as far as the recipe says."""
        rollout = self.recipe.rollout

        def sample(count: int, rounds: int) -> Round:
            purpose = f"step-{step}-refill-{rounds}" if rounds else f"step-{step}"
            tasks = self.curriculum.take(count)
            groups = self.sample_and_grade(tasks, rollout.group_size, purpose, seconds)
            return groups, self.trainer.advantages(groups)

        return fill_batch(sample, rollout.prompts_per_step, oversample=rollout.oversample, refill=rollout.refill)

    def train(self, sampled: Sampled, step: int) -> StepStats:
        """One step on the groups that make up the batch."""
        groups, advantages = sampled.groups, sampled.advantages
        return self.trainer.step([groups[i] for i in sampled.trained], [advantages[i] for i in sampled.trained], step)

    def sample_and_grade(
        self, tasks: Sequence[Task], samples: int, purpose: str, seconds: dict[str, float]
    ) -> list[list[Graded]]:
        """`samples` answers to each task, graded as they land; one group a task, in the tasks' order."""
        rollout, seed = self.recipe.rollout, self.recipe.run.seed
        first = self._groups
        self._groups += len(tasks)
        sampling = Sampling(
            rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.stop
        )
        with timed(seconds, "sample"):
            self.sampler.submit(
                [
                    Group(
                        group=first + index,
                        task_id=task.id,
                        prompt_ids=self.prompts[task.id],
                        seeds=tuple(_seed(seed, purpose, index, member) for member in range(samples)),
                        sampling=sampling,
                    )
                    for index, task in enumerate(tasks)
                ]
            )
            futures = {
                (completion.group - first, completion.member): self.grader.submit(
                    self.tasks[completion.task_id], completion
                )
                for completion in self.sampler.landed(len(tasks) * samples)
            }
        with timed(seconds, "grade"):  # what is left of it once the last answer has landed
            return [[futures[index, member].result() for member in range(samples)] for index in range(len(tasks))]

    def sync(self, *, version: int, changed: bool) -> float:
        """Install the trainer's factors in the sampler and prove it; the canary's largest difference in nats."""
        self.factors.write(self.trainer.policy.adapter.factors())
        self.sampler.install(version)
        ids = self.canary.token_ids
        return self.canary.check(
            self.trainer.policy.score(ids), self.sampler.score(ids), version=version, changed=changed
        )

    def export(self, step: int) -> Path:
        """Write what was trained into the run's folder; where it went."""
        policy, lora = self.trainer.policy, self.recipe.lora
        if lora is None:
            return export_model(self.record.path / "model", policy.model, self.snapshot, step)
        return export_adapter(self.record.path / "adapter", policy.adapter.factors(), lora, self.snapshot, step)

    def evaluate(self, console: Console, when: str) -> dict[str, SuiteResult]:
        """Every held-out suite under the present weights; the same seeds each time, so that runs pair."""
        results = {}
        for name, tasks in self.suites.items():
            groups = self.sample_and_grade(tasks, self.recipe.eval.samples, f"eval-{name}", {})
            advantages = self.trainer.advantages(groups)
            self.record.rollouts(f"{name}-{when.replace(' ', '-')}", Sampled(groups, advantages, (), 1), self.tasks)
            results[name] = suite_result(name, tasks, [item for group in groups for item in group])
            console.suite(results[name], when)
        return results


def _sampler_config(recipe: Recipe, snapshot: Snapshot) -> SamplerConfig:
    rollout = recipe.rollout
    return SamplerConfig(
        model_dir=str(snapshot.folder),
        dtype=rollout.dtype,
        device=rollout.devices[0],
        max_model_len=rollout.max_prompt_tokens + rollout.max_tokens,
        max_sequences=MAX_SEQUENCES if rollout.devices[0] == "cpu" else 4 * MAX_SEQUENCES,
        kv_cache_mb=rollout.kv_cache_mb,
        gpu_memory_fraction=rollout.gpu_memory_fraction,
        seed=recipe.run.seed,
    )


def _seed(*parts: object) -> int:
    """A 32-bit seed that depends on every part and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the wall seconds that the context took to those of `phase`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
