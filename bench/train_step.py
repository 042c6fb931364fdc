"""A whole GRPO step against TRL's, on this machine's CPU: `python bench/train_step.py --json OUT`.

Forward, loss, backward, clip and AdamW of SmolLM2-135M-Instruct in fp32 with LoRA r=16 on its seven projections: 8
groups of 8, prompts of 128 or of 512 tokens, completions of 32 to 256, random token ids of the vocabulary, the same
ids, rewards, factors and objective on both sides (centred rewards, clip 0.2 / 0.28, token-level normaliser, no KL,
temperature 1). Ours is `Trainer.step`; TRL's is `GRPOTrainer.train()` whose sampling is replaced by those ids, timed
from its step's begin to its end. Both print their gradient's norm: the same work has the same norm.

Which micro-batch is TRL's fastest under `--memory-gib` is measured first, on one group (`--trl-batch` skips that). Ours
runs as the quickstart's recipe says and once more with activation checkpointing. Every measurement is one step in a
process of its own, a thread each, rounds interleaved, CPU seconds with wall seconds beside; memory is the peak resident
size over what stood before the step. The whole takes well over an hour on two cores; `--groups 2 --rounds 1` is quicker
(both sides' time is proportional to the groups). Peers come from the extra `bench`.

Gradients are compared with a float64 reference on a smaller batch: a plain transformers model, plain LoRA, a plain
log_softmax, each sequence alone; in bf16 beside the same plain model's own error in bf16, PEFT's casts included.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.peer_trl import Clock, Setting, grpo_trainer, missing  # noqa: E402
from bench.plain_gradient import Work, factor, flat, make_work, move_frozen, plain_gradient  # noqa: E402
from bench.report import Answer, Row, Target, in_a_process, least, print_rows, publish, ratio, resident, rows_of, target  # noqa: E402
from engine.recipe import Recipe  # noqa: E402
from engine.recipe_file import load  # noqa: E402
from engine.snapshot import resolve  # noqa: E402
from engine.train import Trainer  # noqa: E402

RECIPE = ROOT / "recipes" / "quickstart.toml"
PROMPTS = {"prompts_128": 128, "prompts_512": 512}
COMPLETION = (32, 256)
UNITS = {"cpu_s": "s", "wall_s": "s", "peak_mb": "MB", "grad_norm": "", "tokens_forward": "tokens"}
SPEED_UP = {"prompts_128": 1.5, "prompts_512": 3.0}
MEMORY_SHARE = 1 / 3
SETTINGS = (*(Setting(n) for n in (1, 2, 4, 8)), Setting(8, checkpointing=True), Setting(1, liger=True))
OURS = {"ours": (), "ours checkpointing": ("train.checkpointing=true",)}
UNCLIPPED = "optim.max_grad_norm=1e30"
"""The clip would scale a gradient that is looked at."""
GRADIENTS = {"gradient_fp32": "float32", "gradient_bf16": "bfloat16"}


def recipe_of(work: Work, dtype: str, *more: str) -> Recipe:
    """The quickstart's model and LoRA with this script's step."""
    return load(
        RECIPE,
        (
            "run.steps=1",
            f"model.dtype={dtype}",
            f"rollout.group_size={len(work.rewards[0])}",
            f"rollout.prompts_per_step={len(work.prompts)}",
            f"rollout.max_tokens={work.longest}",
            "rollout.temperature=1.0",
            *more,
        ),
    )


class Meter:
    """Clocks and memory between `begin` and `end`, and `settle`d memory before."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def begin(self) -> None:
        """From here on."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._resident = resident("VmRSS")
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Until here."""
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        peak = resident("VmHWM")
        self.figures = {"cpu_s": cpu, "wall_s": wall, "peak_mb": peak - self._resident, "whole_mb": peak}


def step_ours(work: Work, model_dir: Path, settings: Sequence[str]) -> Answer:
    """One step of our trainer."""
    trainer = our_trainer(recipe_of(work, "float32", *settings), model_dir)
    groups = work.graded()
    meter = Meter()
    meter.begin()
    stats = trainer.step(groups, trainer.advantages(groups), 1)
    meter.end()
    return meter.figures | {"grad_norm": stats.grad_norm, "tokens_forward": stats.forward_tokens}


def our_trainer(recipe: Recipe, model_dir: Path) -> Trainer:
    """A trainer whose factors have this script's values."""
    trainer = Trainer(recipe, model_dir)
    for name, (a, b) in trainer.policy.adapter.factors().items():
        a.copy_(factor(name, "A", a.shape))
        b.copy_(factor(name, "B", b.shape))
    return trainer


def step_trl(work: Work, model_dir: Path, setting: Setting) -> Answer:
    """One step of TRL's trainer; its sampling hands out the work's tokens."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        size = len(work.rewards[0])
        rows = [(int(prompt), index % size) for index, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [list(work.prompts[g]) for g, _ in rows],
            "completion_ids": [list(work.completions[g][m]) for g, m in rows],
            "logprobs": None,
            "worth": [work.rewards[g][m] for g, m in rows],
        }

    def reward(completions: list[str], worth: list[float], **rest: Any) -> list[float | None]:
        return list(worth)

    meter = Meter()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = grpo_trainer(
            recipe_of(work, "float32"),
            model_dir,
            setting,
            prompts=[{"prompt": str(g)} for g in range(len(work.prompts))],
            reward=reward,
            clock=Clock(meter.begin, meter.end),
            output=Path(scratch),
            rollout=rollout,
        )
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                layer, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
                if rest:
                    parameter.copy_(factor(layer, rest[0], parameter.shape))
        trainer.train()
    norm = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    padded = (len(work.prompts[0]) + work.longest) * len(work.prompts) * len(work.rewards[0])
    return meter.figures | {"grad_norm": norm, "tokens_forward": padded}


def our_gradient(work: Work, recipe: Recipe, model_dir: Path, moved: int | None = None) -> torch.Tensor:
    """The factors' gradient of one step of our trainer, flat and in float64, as `plain_gradient` gives it."""
    trainer = our_trainer(recipe, model_dir)
    if moved is not None:
        move_frozen(trainer.policy.model, moved)
    groups = work.graded()
    trainer.step(groups, trainer.advantages(groups), 1)
    return flat([(layer.lora_a.grad, layer.lora_b.grad) for layer in trainer.policy.adapter.layers.values()])


def gradient_errors(case: str, model_dir: Path, settings: Sequence[str]) -> Answer:
    """Relative L2 errors of our gradient and of the plain model's in the same dtype, against float64."""
    dtype = GRADIENTS[case]
    # bf16 products are emulated on many CPUs, so that batch is small.
    shape = (64, 2, 4, (16, 48)) if dtype == "float32" else (16, 2, 2, (8, 16))
    work = make_work(model_dir, *shape)
    recipe = recipe_of(work, dtype, *settings, UNCLIPPED)
    ours = our_gradient(work, recipe, model_dir)
    assert recipe.lora is not None  # the quickstart's
    want = plain_gradient(work, model_dir, recipe.lora, torch.float64)
    plain = plain_gradient(work, model_dir, recipe.lora, getattr(torch, dtype))
    return {name: float((got - want).norm() / want.norm()) for name, got in (("ours", ours), ("plain", plain))}


@contextmanager
def memory_limit(gib: float) -> Iterator[None]:
    """Allocations above it fail instead of taking the machine down."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def child(case: str, impl: str, options: argparse.Namespace) -> Answer:
    """What a measuring process runs."""
    torch.set_num_threads(options.threads)
    model_dir = resolve_model()
    if case in GRADIENTS:
        return gradient_errors(case, model_dir, options.set)
    work = make_work(model_dir, PROMPTS[case], options.groups, 8, COMPLETION)
    with memory_limit(options.memory_gib):
        if impl in OURS:
            return step_ours(work, model_dir, (*options.set, *OURS[impl]))
        return step_trl(work, model_dir, next(s for s in SETTINGS if s.name == impl))


def resolve_model() -> Path:
    """The quickstart's model."""
    model = load(RECIPE).model
    return resolve(model.source, model.sha256).folder


Spawn = Callable[[str, str, int], "Answer | str"]


def spawner(options: argparse.Namespace) -> Spawn:
    """Measure (case, implementation, groups) in a process of its own."""

    def spawn(case: str, impl: str, groups: int) -> Answer | str:
        arguments = ["--child", case, impl, "--groups", str(groups), "--threads", str(options.threads)]
        arguments += ["--memory-gib", str(options.memory_gib), *(f"--set={text}" for text in options.set)]
        return in_a_process(Path(__file__), arguments, threads=options.threads, limit=options.limit)

    return spawn


def choose_setting(case: str, spawn: Spawn, rows: list[Row], notes: list[str]) -> Setting | None:
    """TRL's fastest setting that fits, by one group each."""
    seen: dict[Setting, float] = {}
    for setting in SETTINGS:
        answer = spawn(case, setting.name, 1)
        if isinstance(answer, str):
            notes.append(f"{case}: {setting.name} not measured: {answer}")
            print(notes[-1], flush=True)
            continue
        seen[setting] = answer["cpu_s"]
        found = rows_of(f"{case}_one_group", setting.name, UNITS, [answer])
        rows += found
        print_rows(found)
    if not seen:
        return None
    best = min(seen, key=lambda setting: seen[setting])
    notes.append(f"{case}: {best.name} is TRL's fastest setting that fits")
    return best


def compare(case: str, options: argparse.Namespace, spawn: Spawn, notes: list[str]) -> list[Row]:
    """Interleaved rounds of one case."""
    rows: list[Row] = []
    if reason := missing():
        notes.append(f"{case}: trl not measured: {reason}")
        setting = None
    else:
        setting = Setting(options.trl_batch) if options.trl_batch else choose_setting(case, spawn, rows, notes)
    impls = [*OURS, *([setting.name] if setting else [])]
    seen: dict[str, list[Answer]] = {}
    for _ in range(options.rounds):
        for impl in list(impls):
            answer = spawn(case, impl, options.groups)
            if isinstance(answer, str):
                notes.append(f"{case}: {impl} not measured: {answer}")
                print(notes[-1], flush=True)
                impls.remove(impl)
            else:
                seen.setdefault(impl, []).append(answer)
    for impl, answers in seen.items():
        found = rows_of(case, impl if impl in OURS else "trl", UNITS, answers)
        rows += found
        print_rows(found)
    return rows


def lean(rows: list[Row], case: str) -> str:
    """Our fastest variant that takes at most a third of TRL's memory; plain `ours` where none does."""
    theirs = least(rows, case, "trl", "peak_mb")
    memory = {impl: ratio(least(rows, case, impl, "peak_mb"), theirs) for impl in OURS}
    fitting = [impl for impl, share in memory.items() if share is not None and share <= MEMORY_SHARE]
    return min(fitting, key=lambda impl: least(rows, case, impl, "cpu_s") or 0.0, default="ours")


def targets(rows: list[Row]) -> list[Target]:
    """The figures to reach, where both sides were measured; speed and memory of one and the same variant of ours."""
    made: list[Target] = []
    for case, speed_up in SPEED_UP.items():
        impl = lean(rows, case)
        figures = {m: (least(rows, case, impl, m), least(rows, case, "trl", m)) for m in UNITS}
        times, memory, norms = figures["cpu_s"], figures["peak_mb"], figures["grad_norm"]
        made += target(f"{case}: TRL's time over {impl}", ratio(times[1], times[0]), speed_up, "higher")
        made += target(f"{case}: memory of {impl} over TRL's", ratio(*memory), MEMORY_SHARE, "lower")
        same = ratio(*norms)
        made += target(f"{case}: gradient norms differ by", None if same is None else abs(same - 1), 1e-3, "lower")
    fp32 = least(rows, "gradient_fp32", "ours", "error")
    made += target("gradient_fp32: error against float64", fp32, 1e-6, "lower")
    bf16 = ratio(least(rows, "gradient_bf16", "ours", "error"), least(rows, "gradient_bf16", "plain", "error"))
    made += target("gradient_bf16: error over the plain model's in bf16", bf16, 1.25, "lower")
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    cases = (*GRADIENTS, *PROMPTS)
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases), help="these cases")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each implementation")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 in a step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of our recipe, train.* say")
    parser.add_argument("--trl-batch", type=int, choices=(0, 1, 2, 4, 8), default=0, help="TRL's; 0 finds its fastest")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="what a process may allocate")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds one measurement may take")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "IMPL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        case, impl = options.child
        print(json.dumps(child(case, impl, options)))
        return
    resolve_model()  # fetched once, before anything is measured
    spawn = spawner(options)
    rows: list[Row] = []
    notes: list[str] = []
    for case in options.only:
        if case in PROMPTS:
            rows += compare(case, options, spawn, notes)
            continue
        answer = spawn(case, "both", 1)
        if isinstance(answer, str):
            notes.append(f"{case}: not measured: {answer}")
            continue
        for impl, error in answer.items():
            rows += rows_of(case, impl, {"error": "relative L2"}, [{"error": error}])
        print_rows(rows[-len(answer) :])
    publish("bench/train_step.py", rows, targets(rows), notes, options.json)


if __name__ == "__main__":
    main()
