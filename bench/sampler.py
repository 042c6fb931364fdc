"""Tokens a second through a sampler process: `python bench/sampler.py --json OUT`. Needs the extra `cpu`.

The peer is vLLM's own offline `LLM.generate` in one process, with the same engine options, prompts (the quickstart's),
seeds and log-probs. Both sample the same tokens. Every measurement has a process of its own, rounds interleave.
Then thousands of groups in a row with an install after every twenty, on a tiny random model: by how much the two
processes have grown. One round of warming up is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.report import Answer, Row, Target, in_a_process, print_rows, publish, ratio, rows_of, target  # noqa: E402
from engine.rollout.messages import Group, SamplerConfig, Sampling  # noqa: E402

PROMPTS, MEMBERS = 8, 8
IMPLS = ("sampler process", "LLM.generate")
UNITS = {"tokens": "1/s", "cpu": "s", "wall": "s"}
CASE = f"{PROMPTS} x {MEMBERS}"
SOAK_SEEDS, SOAK_TOKENS, SOAK_BATCH = (0, 1, 2, 3), 8, 20


def quickstart() -> tuple[Path, list[tuple[int, ...]]]:
    """The quickstart's model and the first prompts that it trains on."""
    from transformers import AutoTokenizer

    from engine.recipe_file import load
    from engine.rollout import render_prompts
    from engine.snapshot import resolve
    from engine.tasks import load_tasks

    recipe = load(ROOT / "recipes" / "quickstart.toml")
    model = resolve(recipe.model.source, recipe.model.sha256).folder
    tasks = load_tasks(recipe.tasks.train)[:PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompts = render_prompts(tasks, tokenizer, recipe.tasks, recipe.rollout.max_prompt_tokens)
    return model, [prompt.ids for prompt in prompts]


def groups(prompts: list[tuple[int, ...]], tokens: int, number: int) -> list[Group]:
    """A round's groups; its seeds are its own."""
    return [
        Group(
            PROMPTS * number + i,
            f"task-{i}",
            ids,
            tuple(1000 * number + MEMBERS * i + member for member in range(MEMBERS)),
            Sampling(tokens, 0.7),
        )
        for i, ids in enumerate(prompts)
    ]


def config(model: Path, **changes: object) -> SamplerConfig:
    values: dict[str, object] = {
        "model_dir": str(model),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 512,
        "max_sequences": PROMPTS * MEMBERS,
        "kv_cache_mb": 512,
        "gpu_memory_fraction": 0.5,
        "seed": 0,
    }
    return SamplerConfig(**(values | changes))  # type: ignore[arg-type]


def through_process(rounds: int, tokens: int, threads: int) -> list[Answer]:
    """One real sampler, driven as a run drives it. CPU seconds are the sampler's and this process's."""
    from engine.rollout import Samplers, children

    model, prompts = quickstart()
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        configs = [config(model)]
        samplers = Samplers(configs, children(configs, threads=threads, logs=[Path(folder) / "log"]))
        try:
            samplers.wait_ready()
            for number in range(rounds + 1):
                cpu, start = cpu_seconds(samplers.pids), time.perf_counter()
                samplers.submit(groups(prompts, tokens, number))
                sampled = sum(len(c.token_ids) for c in samplers.landed(PROMPTS * MEMBERS))
                wall = time.perf_counter() - start
                answers.append({"tokens": sampled / wall, "cpu": cpu_seconds(samplers.pids) - cpu, "wall": wall})
        finally:
            samplers.close()
    return answers[1:]


def offline(rounds: int, tokens: int) -> list[Answer]:
    """vLLM alone."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams, TokensPrompt

    model, prompts = quickstart()
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=PROMPTS * MEMBERS,
        max_num_batched_tokens=2048,
        enable_chunked_prefill=False,
        block_size=32,
        kv_cache_memory_bytes=512 << 20,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    answers: list[Answer] = []
    for number in range(rounds + 1):
        asked = [(g.prompt_ids, seed) for g in groups(prompts, tokens, number) for seed in g.seeds]
        params = [SamplingParams(max_tokens=tokens, temperature=0.7, seed=seed, logprobs=0) for _, seed in asked]
        cpu, start = cpu_seconds([]), time.perf_counter()
        outputs = llm.generate([TokensPrompt(prompt_token_ids=list(ids)) for ids, _ in asked], params, use_tqdm=False)
        sampled = sum(len(out.outputs[0].token_ids) for out in outputs)
        wall = time.perf_counter() - start
        answers.append({"tokens": sampled / wall, "cpu": cpu_seconds([]) - cpu, "wall": wall})
    return answers[1:]


def soak(count: int) -> Answer:
    """MiB that the sampler and this process grew by over `count` groups, from the first tenth on."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.rollout import Samplers, children
    from engine.sync import SharedTensors

    shape = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaForCausalLM(shape).save_pretrained(folder / "model")
        layer = "model.layers.0.mlp.down_proj"
        memory = SharedTensors({layer: (torch.Size((4, 96)), torch.Size((64, 4)))})
        configs = [config(folder / "model", tokenizer=False, kv_cache_mb=64)]
        samplers = Samplers(configs, children(configs, threads=1, logs=[folder / "log"]))
        try:
            samplers.wait_ready()
            samplers.bind(memory)
            seen: list[tuple[float, float]] = []
            for first in range(0, count, SOAK_BATCH):
                samplers.install(first, {layer: (torch.randn(4, 96), torch.randn(64, 4))})
                samplers.submit(
                    [
                        Group(n, "t", tuple((n + 7 * i) % 512 for i in range(50)), SOAK_SEEDS, Sampling(SOAK_TOKENS))
                        for n in range(first, first + SOAK_BATCH)
                    ]
                )  # fmt: skip
                for _ in samplers.landed(SOAK_BATCH * len(SOAK_SEEDS)):
                    pass
                seen.append((resident_mb(samplers.pids[0]), resident_mb(os.getpid())))
        finally:
            samplers.close()
            memory.close()
    start = seen[len(seen) // 10]
    return {"sampler": seen[-1][0] - start[0], "trainer": seen[-1][1] - start[1]}


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of this process and the given ones."""
    ticks = 0
    for pid in (os.getpid(), *pids):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--passes", type=int, default=2, help="processes of each side, interleaved")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--soak", type=int, default=2000, metavar="GROUPS", help="0 leaves it out")
    parser.add_argument("--child", choices=IMPLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.child == IMPLS[0]:
            answers = through_process(options.rounds, options.tokens, options.threads)
        else:
            answers = offline(options.rounds, options.tokens)
        print(json.dumps({"rounds": answers}), flush=True)
        os._exit(0)  # vLLM's way out of the interpreter takes seconds
    measured: dict[str, list[Answer]] = {impl: [] for impl in IMPLS}
    notes = [f"{options.threads} thread(s), {CASE} completions of at most {options.tokens} tokens"]
    for _ in range(options.passes):
        for impl in IMPLS:
            arguments = ["--child", impl, "--rounds", str(options.rounds), "--tokens", str(options.tokens)]
            arguments += ["--threads", str(options.threads)]
            answer = in_a_process(Path(__file__), arguments, threads=options.threads, limit=900)
            if isinstance(answer, str):
                notes.append(f"{impl}: not measured: {answer}")
            else:
                measured[impl] += answer["rounds"]
    rows = [row for impl, answers in measured.items() for row in rows_of(CASE, impl, UNITS, answers)]
    best = {row.impl: row.max for row in rows if row.metric == "tokens"}
    share = ratio(best.get(IMPLS[0]), best.get(IMPLS[1]))
    targets: list[Target] = target(
        "tokens/s of the sampler process / LLM.generate, best of each", share, 0.95, "higher"
    )
    print_rows(rows)
    if options.soak:
        grown = soak(options.soak)
        for name, value in grown.items():
            row = Row(f"{options.soak} groups", name, "memory grown", "MiB", value, value, value)
            rows.append(row)
            print_rows([row])
            targets += target(f"memory of the {name} grown over {options.soak} groups, MiB", value, 20.0, "lower")
    publish("bench/sampler.py", rows, targets, notes, options.json)


if __name__ == "__main__":
    main()
