"""The Triton and flash kernels on a CUDA GPU: `python bench/gpu_kernels.py --json OUT`.

First correctness: every kernel against float64 (and, in bf16, against 1.25 times the bf16 reference's own
error), and the promise that a row has the same bits in any batch. Then medians of `triton.testing.do_bench`
beside the plain PyTorch way, and the fraction of the roofline: 989 TFLOP/s dense bf16 (H100/H200 SXM,
NVIDIA's data sheet), and beside it the fraction of what cuBLAS reached in this run. Exits 1 if a kernel is
wrong, 0 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton

from kernels.attention import segment_attention
from kernels.layout import Layout
from kernels.lm_head import token_logprobs, token_loss
from kernels.lora import lora_linears

PEAK_TFLOPS = 989.0
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance over norm, L2."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Random numbers that bf16 holds exactly."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(BF16)


def head_results(impl: str, dtype: torch.dtype, form: str, **case: Any) -> list[torch.Tensor]:
    """logprob, entropy and gradients of hidden, weight (and factors)."""
    tokens, width, vocab = case["shape"]
    hidden = normal(tokens, width, seed=1).to(dtype).requires_grad_()
    weight = normal(vocab, width, scale=0.4 if width < 100 else 0.05, seed=2).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(3)).cuda()
    wide = torch.promote_types(dtype, FP32)
    factors = [normal(8, width, scale=0.1, seed=4), normal(vocab, 8, scale=0.1, seed=5)] if case["lora"] else []
    factors = [f.to(wide).requires_grad_() for f in factors]
    lora = (factors[0], factors[1], 1.7) if factors else None
    valid = (normal(tokens, seed=6) > -0.3) if case["masked"] else None
    advantage = normal(tokens, seed=7)
    advantage[::3] = 0

    def objective(lp: torch.Tensor, entropy: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        weight = advantage[rows].to(lp.dtype)
        return (lp.sigmoid() * weight).sum() - 0.01 * (entropy * weight.abs()).sum()

    options = {"temperature": 0.7, "softcap": case["softcap"], "lora": lora, "valid": valid, "impl": impl}
    if form == "loss":
        loss, lp, entropy = token_loss(hidden, weight, targets, objective, **options)
    else:
        lp, entropy = token_logprobs(hidden, weight, targets, **options)
        rows = slice(0, tokens) if valid is None else valid.nonzero().flatten()
        loss = objective(lp[rows], entropy[rows], rows)
    return [lp.detach(), entropy.detach(), *torch.autograd.grad(loss, [hidden, weight, *factors])]


def attention_results(impl: str, dtype: torch.dtype, layout: Layout, dim: int) -> list[torch.Tensor]:
    """Output and gradients of 8 query heads on 2 key heads."""
    shapes = [(layout.n_tokens, h, dim) for h in (8, 2, 2, 8)]
    *inputs, upstream = (normal(*s, seed=i).to(dtype) for i, s in enumerate(shapes))
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v = leaves
    out = segment_attention(q, k, v, layout, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def lora_results(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs and gradients of q, k and v with one rank that is no power of two."""
    wide = torch.promote_types(dtype, FP32)
    x = normal(301, 320, seed=1).to(dtype).requires_grad_()
    weights = [normal(o, 320, scale=0.05, seed=o).to(dtype) for o in (320, 128, 72)]
    factors: list[Any] = [
        (normal(r, 320, scale=0.05, seed=r).to(wide).requires_grad_(), normal(o, r, seed=9).to(wide).requires_grad_())
        for r, o in ((16, 320), (12, 128))
    ]
    outs = lora_linears(x, weights, [*factors, None], 0.5, impl=impl)
    leaves = [x, *(t for pair in factors for t in pair)]
    upstream = [normal(*y.shape, seed=11).to(dtype) for y in outs]
    return [*(y.detach() for y in outs), *torch.autograd.grad(outs, leaves, upstream)]


def tree(header: int, prompts: int, prompt: int, group: int, completion: int) -> Layout:
    """A header, prompts on it, completions of varied length on each."""
    lengths, prefixes = [header] + [prompt] * prompts, [-1] + [0] * prompts
    for p in range(prompts):
        lengths += [max(1, completion - 7 * i) for i in range(group)]
        prefixes += [1 + p] * group
    return Layout.from_lengths(lengths, prefixes)


def checks() -> dict[str, Callable[[], list[str]]]:
    """Name of every check, and what runs it: complaints, none if it holds."""
    made: dict[str, Callable[[], list[str]]] = {}

    def bind(run: Callable[..., list[str]], *arguments: Any) -> Callable[[], list[str]]:
        return lambda: run(*arguments)

    def head(case: dict[str, Any], form: str, dtype: torch.dtype) -> list[str]:
        return against(lambda impl, d: head_results(impl, d, form, **case), "triton", dtype)

    def attend(layout: Layout, dim: int, impl: str, dtype: torch.dtype) -> list[str]:
        return against(lambda i, d: attention_results(i, d, layout, dim), impl, dtype)

    def against(results: Callable[[str, torch.dtype], list[torch.Tensor]], impl: str, dtype: torch.dtype) -> list[str]:
        want, peer, got = results("reference", FP64), results("reference", dtype), results(impl, dtype)
        errors = [(relative(g, w), relative(p, w)) for g, p, w in zip(got, peer, want, strict=True)]
        # The reference multiplies the head's factors in fp32; ours reads a gradient rounded to bf16, once or twice.
        factor = 3e-3 if want[0].dim() == 1 else 0.0
        floors = [5e-6 if dtype == FP32 else factor if i >= 4 else 0.0 for i in range(len(errors))]
        bad = [i for i, (ours, theirs) in enumerate(errors) if not ours <= max(floors[i], 1.25 * theirs)]
        return [f"output {i}: error {errors[i][0]:.2e}, reference's own {errors[i][1]:.2e}" for i in bad]

    shapes = [(300, 64, 1000), (130, 576, 4099)]
    options = [(None, False, False), (5.0, False, False), (None, True, True), (3.0, True, True)]
    for shape in shapes:
        for softcap, lora, masked in options:
            for dtype in (FP32, BF16):
                for form in ("loss", "logprobs"):
                    case = {"shape": shape, "softcap": softcap, "lora": lora, "masked": masked}
                    name = f"lm_head {form} {str(dtype)[6:]} {case}"
                    made[name] = bind(head, case, form, dtype)
    layouts = {
        "tree": tree(90, 3, 70, 4, 40),
        "long": tree(1, 2, 400, 3, 300),
        "empty": Layout((0, 5, 5, 9), (-1, 0, 1)),
    }
    for name, layout in layouts.items():
        for dim in (16, 32, 64, 128):
            for impl, dtype in (("triton", FP32), ("triton", BF16), ("triton", torch.float16), ("flash", BF16)):
                name_of = f"attention {impl} {str(dtype)[6:]} head_dim {dim} {name}"
                made[name_of] = bind(attend, layout, dim, impl, dtype)
    for dtype in (FP32, BF16):
        made[f"lora triton {str(dtype)[6:]}"] = bind(against, lora_results, "triton", dtype)
    made["lm_head: a row has the same bits in any batch"] = same_bits_head
    made["attention: a chain has the same bits alone and packed"] = same_bits_attention
    return made


def same_bits_head() -> list[str]:
    """Log-probs of 1, 7 and 300 rows."""
    hidden, weight = normal(300, 576, seed=1), normal(4099, 576, scale=0.05, seed=2)
    targets = torch.arange(300, device="cuda")
    whole = token_logprobs(hidden, weight, targets, impl="triton")
    bad = []
    for rows in (slice(0, 1), slice(13, 20), slice(100, 299)):
        part = token_logprobs(hidden[rows], weight, targets[rows], impl="triton")
        if not all(torch.equal(p, w[rows]) for p, w in zip(part, whole, strict=True)):
            bad.append(f"rows {rows} differ from the whole batch")
    return bad


def same_bits_attention() -> list[str]:
    """One completion packed with others, and alone behind its prompt."""
    layout = Layout.from_lengths([130, 60, 90, 40], [-1, 0, 1, 1])
    q, k, v = (normal(layout.n_tokens, h, 64, seed=h) for h in (8, 2, 4))
    v = v[:, :2].contiguous()
    index = torch.cat([torch.arange(190), torch.arange(280, 320)]).cuda()
    alone = Layout.from_lengths([130, 60, 40], [-1, 0, 1])
    packed = segment_attention(q, k, v, layout, impl="triton")
    out = segment_attention(q[index], k[index], v[index], alone, impl="triton")
    return [] if torch.equal(out, packed[index]) else ["the completion's bits depend on the batch"]


def median_ms(call: Callable[[], Any]) -> float:
    """Median of do_bench with a short budget."""
    return float(triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median"))


def timings() -> list[tuple[str, str, float, float]]:
    """(case, implementation, milliseconds, FLOP) of the shapes that a Qwen3-4B trainer step has."""
    made: list[tuple[str, str, float, float]] = []

    def add(case: str, impl: str, flop: float, call: Callable[[], Any]) -> None:
        try:
            made.append((case, impl, median_ms(call), flop))
        except Exception as error:  # one kernel that fails must not hide the figures of the others
            traceback.print_exc()
            print(f"  {case} {impl}: {type(error).__name__}: {error}")

    x, w = normal(8192, 2560, seed=1), normal(9728, 2560, seed=2)
    add("gemm 8192x2560x9728", "cublas", 2.0 * 8192 * 2560 * 9728, lambda: x @ w.T)

    for tokens, width, vocab in ((4096, 2560, 151936), (8192, 576, 49152)):
        hidden = normal(tokens, width, seed=1).requires_grad_()
        weight = normal(vocab, width, scale=0.02, seed=2)
        targets = torch.arange(tokens, device="cuda")
        coefficient = normal(tokens, seed=3).float()
        product = 2.0 * tokens * width * vocab
        case = f"lm_head {tokens}x{width}x{vocab}"

        def loss(impl: str, h: Any = hidden, w: Any = weight, t: Any = targets, c: Any = coefficient) -> None:
            out = token_loss(h, w, t, lambda lp, e, rows: (lp * c[rows]).sum(), impl=impl)[0]
            torch.autograd.grad(out, h)

        def forward(impl: str, h: Any = hidden, w: Any = weight, t: Any = targets) -> None:
            with torch.no_grad():
                token_logprobs(h, w, t, impl=impl)

        for impl in ("triton", "reference"):
            add(f"{case} forward", impl, product, partial(forward, impl))
            add(f"{case} loss and dH", impl, 2 * product, partial(loss, impl))

    layout = tree(1, 4, 1024, 8, 384)
    q, k, v = (normal(layout.n_tokens, h, 128, seed=h).requires_grad_() for h in (32, 8, 8))
    upstream = normal(layout.n_tokens, 32, 128, seed=5)
    pairs = sum(n * layout.prefix_length(s) + n * (n + 1) / 2 for s, n in enumerate(layout.lengths))
    for impl in ("triton", "flash"):
        out_flop = 4.0 * pairs * 32 * 128
        add(
            "attention 32x8x128 forward",
            impl,
            out_flop,
            partial(segment_attention, q, k, v, layout, impl=impl),
        )
        out = segment_attention(q, k, v, layout, impl=impl)
        add(
            "attention 32x8x128 backward",
            impl,
            2.5 * out_flop,
            partial(torch.autograd.grad, out, (q, k, v), upstream, retain_graph=True),
        )

    x = normal(8192, 2560, seed=1).requires_grad_()
    for name, outs in (("qkv", (4096, 1024, 1024)), ("gate_up", (9728, 9728))):
        weights = [normal(o, 2560, scale=0.02, seed=o) for o in outs]
        factors: list[Any] = [
            (normal(16, 2560).float().requires_grad_(), normal(o, 16).float().requires_grad_()) for o in outs
        ]
        ups = [normal(8192, o, seed=7) for o in outs]
        leaves = [x, *(t for pair in factors for t in pair)]
        flop = 4.0 * 8192 * 2560 * sum(outs)

        def step(
            impl: str, weights: Any = weights, factors: Any = factors, ups: Any = ups, leaves: Any = leaves
        ) -> None:
            torch.autograd.grad(lora_linears(x, weights, factors, 2.0, impl=impl), leaves, ups)

        def frozen(weights: Any = weights, ups: Any = ups) -> None:
            torch.autograd.grad([x @ w.T for w in weights], x, ups)

        for impl in ("triton", "reference"):
            add(f"lora {name} forward and backward", impl, flop, partial(step, impl))
        add(f"lora {name} forward and backward", "frozen", flop, frozen)
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu_kernels.py needs a CUDA GPU")
    started = time.perf_counter()
    failed = {}
    for name, run in checks().items():
        try:
            complaints = run()
        except Exception as error:  # a kernel that does not launch is a failed check; the others still run
            complaints = [f"{type(error).__name__}: {error}"]
        if complaints:
            failed[name] = complaints
            print(f"WRONG {name}: {complaints}", flush=True)
    count = len(checks())
    print(f"{count - len(failed)} of {count} checks hold, {time.perf_counter() - started:.0f} s", flush=True)
    rows = []
    measured = timings()
    cublas = max((flop / ms / 1e9 for case, _, ms, flop in measured if case.startswith("gemm")), default=0.0)
    for case, impl, ms, flop in measured:
        rate = flop / ms / 1e9
        print(f"{case:44s} {impl:10s} {ms:8.3f} ms  {rate:6.0f} TFLOP/s  {rate / PEAK_TFLOPS:.0%} of peak")
        for metric, unit, figure in (
            ("median", "ms", ms),
            ("rate", "TFLOP/s", rate),
            ("of_peak", "fraction", rate / PEAK_TFLOPS),
            ("of_cublas", "fraction", rate / cublas if cublas else 0.0),
        ):
            rows.append(
                {
                    "case": case,
                    "impl": impl,
                    "metric": metric,
                    "unit": unit,
                    "min": figure,
                    "median": figure,
                    "max": figure,
                }
            )
    target = {
        "name": "checks that hold",
        "value": count - len(failed),
        "limit": count,
        "better": "higher",
        "ok": not failed,
    }
    result = {
        "script": "bench/gpu_kernels.py",
        "machine": {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "rows": rows,
        "targets": [target],
        "failed": failed,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
