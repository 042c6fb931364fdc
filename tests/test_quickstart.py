"""Two steps of the quickstart through the real vLLM and the real jail, and what must hold before and after a sync."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from engine import recipe_file as recipes
from engine.errors import RunError
from engine.parts import Parts
from engine.record import step_metrics
from engine.rollout.messages import Group, Sampling
from engine.snapshot import Snapshot, resolve
from engine.sync import SharedTensors
from engine.types import Completion
from sandbox import VERDICTS

pytestmark = pytest.mark.slow
RECIPE = recipes.load(
    "recipes/quickstart.toml",
    (
        "run.steps=2",
        "rollout.prompts_per_step=4",
        "eval.samples=1",
        'tasks.heldout={ heldout = "generated:heldout-families" }',
    ),
)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return resolve(RECIPE.model.source, RECIPE.model.sha256)


@pytest.fixture(scope="module")
def parts(snapshot: Snapshot, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    others = processes().keys()  # this test session's own: another room's pool may still stand
    with ExitStack() as stack:
        cores = len(os.sched_getaffinity(0))
        yield Parts(RECIPE, tmp_path_factory.mktemp("run"), snapshot, cores, stack, print)
    assert not {pid: line for pid, line in processes().items() if pid not in others}


@pytest.fixture(scope="module")
def by_hand() -> list[dict[str, float]]:
    """The steps' metrics that the first test comes to, which a whole run repeats."""
    return []


def processes() -> dict[int, str]:
    """This process's descendants: pid and command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if is_below(folder, os.getpid()):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found


def is_below(folder: Path, ancestor: int) -> bool:
    pid = int(folder.name)
    while pid > 1:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False


def base_hash(parts: Parts) -> str:
    digest = hashlib.sha256()
    for name, tensor in parts.trainer.policy.model.state_dict().items():
        if "lora_" not in name:
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def trainer_logprobs(parts: Parts, completion: Completion) -> list[float]:
    """The trainer's log-probs of a completion's tokens at the sampling temperature, one plain forward."""
    from kernels.layout import Layout
    from kernels.lm_head import token_logprobs

    ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
    policy = parts.trainer.policy
    with torch.no_grad():
        state = policy.hidden(ids[:-1], Layout((0, len(ids) - 1), (-1,)))
        logprobs, _ = token_logprobs(state, policy.head, ids[1:], temperature=RECIPE.rollout.temperature)
    return logprobs[len(completion.prompt_ids) - 1 :].tolist()


def sampled(parts: Parts, seed: int) -> list[Completion]:
    task = parts.curriculum.tasks[0]
    sampling = Sampling(RECIPE.rollout.max_tokens, RECIPE.rollout.temperature)
    parts.samplers.submit([Group(seed, task.id, parts.prompts[task.id].ids, tuple(range(seed, seed + 4)), sampling)])
    return sorted(parts.samplers.landed(4), key=lambda c: c.member)


def mean_difference(parts: Parts, completions: list[Completion]) -> float:
    gaps = [abs(t - s) for c in completions for t, s in zip(trainer_logprobs(parts, c), c.logprobs, strict=True)]
    return sum(gaps) / len(gaps)


def test_two_steps_train_the_adapter_and_nothing_else_and_the_sampler_follows(
    parts: Parts, by_hand: list[dict[str, float]]
) -> None:
    trainer = parts.trainer
    before = {name: (a.clone(), b.clone()) for name, (a, b) in trainer.policy.adapter.factors().items()}
    base = base_hash(parts)
    first = sampled(parts, 100)
    assert mean_difference(parts, first) < 1e-4
    for step in (1, 2):
        groups = parts.sample_step(step, {})
        assert {g.verdict.verdict for group in groups.groups for g in group} <= set(VERDICTS) - {"INFRA", "NO_CODE"}
        stats = parts.train(groups, step)
        assert not stats.skipped
        canary = parts.sync(version=step, changed=True)
        assert canary < 1e-4
        by_hand.append(comparable(step_metrics(groups, stats, {}, canary) | {"step": step}))
    assert base_hash(parts) == base
    for name, (a, b) in trainer.policy.adapter.factors().items():
        assert not torch.equal(a, before[name][0]), name
        assert not torch.equal(b, before[name][1]), name
    second = sampled(parts, 100)
    assert {c.version for c in second} == {step}
    assert mean_difference(parts, second) < 1e-4
    # The same seeds under other weights: the old tokens' log-probs are others now.
    assert any(c.token_ids != d.token_ids or c.logprobs != d.logprobs for c, d in zip(first, second, strict=True))


def test_sampling_is_repeated_by_its_seeds_and_differs_between_members(parts: Parts) -> None:
    once, again, other = sampled(parts, 7), sampled(parts, 7), sampled(parts, 50)
    assert [c.token_ids for c in once] == [c.token_ids for c in again]
    assert [c.logprobs for c in once] == [c.logprobs for c in again]
    assert [c.token_ids for c in once] != [c.token_ids for c in other]
    assert len({c.token_ids for c in once + other}) > 1


def test_a_factor_that_vllm_has_no_place_for_fails_the_sync(parts: Parts) -> None:
    shapes = {n: tuple(t.shape for t in group) for n, group in parts.trainer.policy.trained.tensors().items()}
    shapes["model.layers.0.self_attn.q_porj"] = shapes.pop("model.layers.0.self_attn.q_proj")
    with closing(SharedTensors(shapes)) as renamed, pytest.raises(RunError, match="q_porj"):
        parts.samplers.bind(renamed)


def test_a_whole_run_writes_what_a_person_needs_and_repeats_what_was_done_by_hand(
    snapshot: Snapshot, by_hand: list[dict[str, float]], tmp_path: Path
) -> None:
    from engine.record import create_folder
    from engine.run import run

    others = processes().keys()
    summary = run(RECIPE, create_folder(tmp_path / "run"), snapshot, len(os.sched_getaffinity(0)))
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    heldout = summary["heldout"]
    assert heldout["gain"] == pytest.approx(heldout["after"] - heldout["before"])
    assert heldout["ci95"][0] <= heldout["gain"] <= heldout["ci95"][1]
    assert summary["steps"] == 2
    assert summary["mismatch"]["mean_abs_logprob"] < 1e-4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Another sampler and another trainer with the same seed.
    assert [comparable(line) for line in lines] == by_hand
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").stat().st_size > 1e6
    assert processes().keys() == others


def comparable(line: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics without those of the clock and of the run's mishaps."""
    return {k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "groups/too_old"))}
