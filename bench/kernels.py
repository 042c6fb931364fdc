"""Kernels against their peers on this machine's CPU: `python bench/kernels.py --json OUT`.

Every measurement runs in a process of its own with one thread, rounds interleave the implementations, times
are CPU seconds (wall seconds beside), memory is the peak resident size over what stood before the call. Peers
come from the extra `bench` (trl, liger-kernel, cut-cross-entropy); one that is missing is said to be missing.
The fraction is of the best rate a plain matrix product of the same width reached in this run, on operands that stay
in cache and in the dtype in which this CPU multiplies the case's; `products` are the case's own two products, whole,
with logits and all: what the same library takes for them where the weight comes from memory. Errors are against
float64, relative L2, on a sample of rows.

The head's cases run forward and dH with a frozen weight at temperature 0.9 on random rows. On a CPU without
bf16 products PyTorch's bf16 takes minutes where fp32 takes seconds, so there the bf16 case has fewer tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.peer_heads import HEAD_PEERS, head_logprobs, liger_loss  # noqa: E402
from bench.report import Answer, Row, Target, in_a_process, publish, ratio, resident, target  # noqa: E402
from kernels.attention import segment_attention  # noqa: E402
from kernels.dispatch import cpu_compute_dtype, cpu_has_fast_bf16  # noqa: E402
from kernels.layout import Layout  # noqa: E402
from kernels.lm_head import token_loss  # noqa: E402
from kernels.lora import lora_linears  # noqa: E402

TEMPERATURE = 0.9
SEQUENCE = 256  # tokens that share an advantage, as Liger's loss wants it


@dataclass(frozen=True, slots=True)
class Head:
    """A case of the head: rows, hidden width, vocabulary."""

    tokens: int
    width: int
    vocab: int
    dtype: str
    impls: tuple[str, ...]

    @property
    def flop(self) -> float:
        """Forward and dH: two products."""
        return 4.0 * self.tokens * self.width * self.vocab


HEAD_IMPLS = ("ours", *HEAD_PEERS)
LARGE_HEAD_IMPLS = ("ours", "cce_compile", "liger_grpo")
_FEW = 4096 if cpu_has_fast_bf16() else 128
HEADS = {
    "smollm2_head_fp32": Head(1024, 576, 49152, "float32", HEAD_IMPLS),
    "smollm2_head_bf16": Head(_FEW, 576, 49152, "bfloat16", HEAD_IMPLS),
    "qwen3_4b_head_fp32": Head(512, 2560, 151936, "float32", LARGE_HEAD_IMPLS),
    "qwen3_4b_head_bf16": Head(512, 2560, 151936, "bfloat16", LARGE_HEAD_IMPLS if cpu_has_fast_bf16() else ("ours",)),
}
# (in, outs, tokens) with LoRA r = 16 in fp32
LINEARS = {"lora_qkv": (576, (576, 192, 192), 2048), "lora_gate_up": (576, (1536, 1536), 2048)}
ATTENTIONS = ("attention_short", "attention_long")
CASES = (*HEADS, *LINEARS, *ATTENTIONS)


def implementations(case: str) -> tuple[str, ...]:
    """What runs in a case, ours first."""
    if case in HEADS:
        plain = ("products",) if HEADS[case].dtype == "float32" or cpu_has_fast_bf16() else ()
        return (*HEADS[case].impls, *plain, "gemm")
    return ("ours", "peft", "frozen") if case in LINEARS else ("ours", "padded_sdpa", "dense_mask")


def measure(call: Callable[[], Any], repeats: int, warm: bool) -> dict[str, float]:
    """Best CPU and wall seconds of some calls, and the peak memory of the first measured one in MB."""
    if warm:
        call()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    cpu, wall, peak = [], [], 0.0
    for i in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        cpu.append(time.process_time() - start_cpu)
        wall.append(time.perf_counter() - start)
        if i == 0:
            peak = resident("VmHWM") - before
    return {"cpu_s": min(cpu), "wall_s": min(wall), "peak_mb": peak}


def run_head(case: Head, impl: str) -> dict[str, float]:
    """One head implementation: forward and dH of sum(coefficient * logprob)."""
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    weight = torch.empty(case.vocab, case.width, dtype=dtype).normal_(std=0.05)
    hidden = torch.randn(case.tokens, case.width).to(dtype).requires_grad_()
    targets = torch.randint(0, case.vocab, (case.tokens,))
    size = min(SEQUENCE, case.tokens)
    advantages = torch.randn(case.tokens // size)
    coefficients = (-advantages / case.tokens).repeat_interleave(size)
    large = case.flop > 4e11

    if impl == "gemm":
        return {"gflops": gemm_rate(case)}
    if impl == "products":
        logits, back = torch.empty(case.tokens, case.vocab, dtype=dtype), torch.empty_like(hidden)

        def products() -> None:
            torch.mm(hidden.detach(), weight.T, out=logits)
            torch.mm(logits, weight, out=back)

        return measure(products, 1 if large else 2, warm=True)
    if impl == "ours":

        def loss() -> torch.Tensor:
            def rows_loss(lp: torch.Tensor, entropy: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
                return (coefficients[rows] * lp).sum()

            return token_loss(hidden, weight, targets, rows_loss, temperature=TEMPERATURE)[0]
    elif impl == "liger_grpo":
        liger = liger_loss(advantages, TEMPERATURE)

        def loss() -> torch.Tensor:
            return liger(hidden, weight, targets)
    else:
        logprobs = head_logprobs(impl, TEMPERATURE)

        def loss() -> torch.Tensor:
            return (coefficients * logprobs(hidden, weight, targets).float()).sum()

    def step() -> None:
        hidden.grad = None
        loss().backward()

    result = measure(step, 1 if large else 2, warm=impl == "cce_compile" or not large)
    assert hidden.grad is not None
    result["error"] = head_error(hidden, weight, targets, coefficients, hidden.grad)
    return result


def head_error(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, coefficients: torch.Tensor, grad: torch.Tensor
) -> float:
    """Relative L2 error of dH on 16 rows against float64."""
    rows = torch.linspace(0, hidden.shape[0] - 1, 16).long()
    x = hidden.detach()[rows].double()
    logits = torch.cat([x @ part.double().T for part in weight.split(8192)], 1) / TEMPERATURE
    g = -logits.softmax(1)
    g[torch.arange(len(rows)), targets[rows]] += 1
    g *= (coefficients[rows].double() / TEMPERATURE)[:, None]
    want = torch.zeros_like(x)
    for part, piece in zip(weight.split(8192), g.split(8192, 1), strict=True):
        want += piece @ part.double()
    return float((grad[rows].double() - want).norm() / want.norm())


def gemm_rate(case: Head) -> float:
    """The best GFLOP/s of plain products of this width, either way round, in the dtype that this CPU multiplies in."""
    best, dtype = 0.0, cpu_compute_dtype(getattr(torch, case.dtype))
    for rows in (256, 512):
        for columns in (1024, 2048, 4096):
            x, w = torch.randn(rows, case.width).to(dtype), torch.randn(columns, case.width).to(dtype)
            g, out = torch.randn(rows, columns).to(dtype), torch.empty(rows, columns, dtype=dtype)
            back = torch.empty(rows, case.width, dtype=dtype)
            for product in (lambda: torch.mm(x, w.T, out=out), lambda: torch.mm(g, w, out=back)):  # noqa: B023
                count = max(1, int(2e9 / (rows * columns * case.width)))
                product()
                for _ in range(3):
                    start = time.process_time()
                    for _ in range(count):
                        product()
                    spent = time.process_time() - start
                    best = max(best, 2.0 * rows * columns * case.width * count / spent / 1e9)
    return best


def run_linears(case: str, impl: str) -> dict[str, float]:
    """Forward and backward of a group of linears: ours, PEFT's formula, or the frozen base alone."""
    width, outs, tokens = LINEARS[case]
    torch.manual_seed(0)
    x = torch.randn(tokens, width, requires_grad=True)
    weights = [torch.randn(out, width) * width**-0.5 for out in outs]
    factors = [(torch.randn(16, width).requires_grad_(), torch.randn(out, 16).requires_grad_()) for out in outs]
    upstream = [torch.randn(tokens, out) for out in outs]

    def forward(which: str) -> Any:
        if which == "ours":
            return lora_linears(x, weights, factors, 2.0)
        base = [torch.nn.functional.linear(x, w) for w in weights]
        if which == "frozen":
            return base
        linear = torch.nn.functional.linear
        return [y + linear(linear(x, a), b) * 2.0 for y, (a, b) in zip(base, factors, strict=True)]

    def step(which: str) -> None:
        leaves = [x] if which == "frozen" else [x, *(t for pair in factors for t in pair)]
        torch.autograd.grad(forward(which), leaves, upstream)

    result = measure(lambda: step(impl), 12, warm=True)
    if impl != "frozen":
        result["overhead"] = overhead(lambda: step(impl), lambda: step("frozen"))
    return result


def overhead(call: Callable[[], Any], base: Callable[[], Any], pairs: int = 25) -> float:
    """What a call takes over another one, as a share of it: the median over calls that follow one another.

    A few per cent are less than what a shared machine's speed changes by from one process to the next.
    """
    base()
    shares = []
    for _ in range(pairs):
        start = time.process_time()
        call()
        between = time.process_time()
        base()
        shares.append((between - start) / (time.process_time() - between) - 1)
    return median(shares)


def attention_case(case: str) -> Layout:
    """64 completions of 4-16 tokens on 8 prompts of 30 on a header of 90; or 16 of 32-256 on 2 prompts of 512."""
    generator = torch.Generator().manual_seed(0)
    header, prompts, prompt, group, low, high = (
        (90, 8, 30, 8, 4, 16) if case == "attention_short" else (1, 2, 512, 8, 32, 256)
    )
    lengths, prefixes = [header] + [prompt] * prompts, [-1] + [0] * prompts
    for p in range(prompts):
        lengths += torch.randint(low, high + 1, (group,), generator=generator).tolist()
        prefixes += [1 + p] * group
    return Layout.from_lengths(lengths, prefixes)


def run_attention(case: str, impl: str) -> dict[str, float]:
    """One layer of SmolLM2's attention (9 heads, 3 key heads, head_dim 64), forward and backward, fp32."""
    layout = attention_case(case)
    torch.manual_seed(0)
    q, k, v = (torch.randn(layout.n_tokens, h, 64, requires_grad=True) for h in (9, 3, 3))
    upstream = torch.randn(layout.n_tokens, 9, 64)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    leaves = [s for s in range(layout.n_segments) if s not in layout.prefixes]
    chains = [
        torch.cat([torch.arange(layout.starts[a], layout.starts[a + 1]) for a in layout.chain(s)]) for s in leaves
    ]
    longest = max(len(c) for c in chains)

    def ours() -> torch.Tensor:
        return segment_attention(q, k, v, layout)

    # What a trainer without shared prefixes runs: every sequence whole, padded to the longest.
    padded = [torch.randn(len(leaves), h, longest, 64, requires_grad=True) for h in (9, 3, 3)]
    padded_upstream = torch.randn(len(leaves), 9, longest, 64)
    mask = torch.zeros(layout.n_tokens, layout.n_tokens, dtype=torch.bool)
    for s in range(layout.n_segments):
        own = slice(layout.starts[s], layout.starts[s + 1])
        mask[own, own] = torch.ones(layout.lengths[s], layout.lengths[s], dtype=torch.bool).tril()
        for a, b in layout.prefix_ranges(s):
            mask[own, a:b] = True

    def dense() -> torch.Tensor:
        a, b, c = (x.transpose(0, 1)[None] for x in (q, k, v))
        return sdpa(a, b, c, attn_mask=mask, enable_gqa=True)

    def whole() -> torch.Tensor:
        a, b, c = padded
        return sdpa(a, b, c, is_causal=True, enable_gqa=True)

    def step() -> None:
        if impl == "ours":
            torch.autograd.grad(ours(), (q, k, v), upstream)
        elif impl == "dense_mask":
            torch.autograd.grad(dense(), (q, k, v), upstream.transpose(0, 1)[None])
        else:
            torch.autograd.grad(whole(), padded, padded_upstream)

    return measure(step, 3, warm=True)


def child(case: str, impl: str) -> dict[str, float]:
    """What a measuring process runs."""
    torch.set_num_threads(1)
    if case in HEADS:
        return run_head(HEADS[case], impl)
    return run_linears(case, impl) if case in LINEARS else run_attention(case, impl)


UNITS = {"cpu_s": "s", "wall_s": "s", "peak_mb": "MB", "error": "relative", "gflops": "GFLOP/s"} | {
    "fraction": "of GEMM",
    "overhead": "of frozen",
}


def collect(cases: list[str], rounds: int, limit: float) -> list[Row]:
    """Run everything, interleaved, and print it as it comes."""
    rows: list[Row] = []
    for case in cases:
        seen: dict[str, list[Answer]] = {}
        failed: dict[str, str] = {}
        for _ in range(rounds):
            for impl in implementations(case):
                if impl in failed:
                    continue
                answer = in_a_process(Path(__file__), ("--child", case, impl), threads=1, limit=limit)
                if isinstance(answer, str):
                    failed[impl] = answer
                else:
                    seen.setdefault(impl, []).append(answer)
        rate = max((a["gflops"] for a in seen.get("gemm", [])), default=0.0)
        for impl, answers in seen.items():
            if rate and "cpu_s" in answers[0]:
                for a in answers:
                    a["fraction"] = HEADS[case].flop / a["cpu_s"] / 1e9 / rate
            for metric in answers[0]:
                values = sorted(a[metric] for a in answers)
                rows.append(Row(case, impl, metric, UNITS[metric], values[0], values[len(values) // 2], values[-1]))
        show(case, rows, failed)
    return rows


def show(case: str, rows: list[Row], failed: dict[str, str]) -> None:
    """One case as a table."""
    print(f"\n{case}")
    impls = dict.fromkeys(r.impl for r in rows if r.case == case)
    for impl in impls:
        cells = [f"{r.metric} {r.median:.4g}" for r in rows if r.case == case and r.impl == impl]
        print(f"  {impl:14s} " + "  ".join(cells))
    for impl, why in failed.items():
        print(f"  {impl:14s} not measured: {why}")
    sys.stdout.flush()


def value(rows: list[Row], case: str, impl: str, metric: str) -> float | None:
    """The least of a metric: on a shared machine the best run is the least disturbed one. A ratio's median."""
    found = [r for r in rows if (r.case, r.impl, r.metric) == (case, impl, metric)]
    if not found:
        return None
    if metric == "overhead":
        return found[0].median
    return found[0].max if metric == "fraction" else found[0].min


def targets(rows: list[Row]) -> list[Target]:
    """The figures to reach, where both sides were measured."""
    made: list[Target] = []

    def add(name: str, got: float | None, limit: float, better: str) -> None:
        made.extend(target(name, got, limit, better))

    def over(case: str, impl: str, metric: str) -> float | None:
        return ratio(value(rows, case, "ours", metric), value(rows, case, impl, metric))

    for case in ("smollm2_head_fp32", "smollm2_head_bf16"):
        for impl in HEAD_PEERS:
            add(f"{case}: time over {impl}", over(case, impl, "cpu_s"), 1.0, "lower")
        add(f"{case}: memory over liger_grpo", over(case, "liger_grpo", "peak_mb"), 2.0, "lower")
    for case in ("qwen3_4b_head_fp32", "qwen3_4b_head_bf16"):
        add(f"{case}: fraction of the GEMM rate", value(rows, case, "ours", "fraction"), 0.9, "higher")
        add(f"{case}: time over its two plain products", over(case, "products", "cpu_s"), 1 / 0.9, "lower")
        for impl in ("cce_compile", "liger_grpo"):
            add(f"{case}: time over {impl}", over(case, impl, "cpu_s"), 1.03, "lower")
    for case, limit in (("lora_qkv", 0.12), ("lora_gate_up", 0.09)):
        add(f"{case}: overhead over the frozen model", value(rows, case, "ours", "overhead"), limit, "lower")
    for case in ATTENTIONS:
        for impl in ("padded_sdpa", "dense_mask"):
            add(f"{case}: time over {impl}", over(case, impl, "cpu_s"), 1.0, "lower")
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each implementation")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds one measurement may take")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "IMPL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child)))
        return
    rows = collect(arguments.only, arguments.rounds, arguments.limit)
    publish("bench/kernels.py", rows, targets(rows), (), arguments.json)


if __name__ == "__main__":
    main()
