"""New weights into a running vLLM: `python bench/sync.py --json OUT`. Needs the extra `cpu`; takes some minutes.

Ours runs as in training: this side writes the factors into shared memory, a sampler process takes them over, or this
side sends them by gloo, which is then the phase `fetch`. Beside it, each with vLLM in the measuring process: packing
the same weights as vLLM itself does, which the merged install can't avoid; a reload of all weights through vLLM's
loader; an adapter saved to disk and loaded again in place; and the way of TRL's vllm-server mode: merge, send every
tensor over HTTP, unmerge. `copy` is one copy of the factors' bytes, the least that a transfer can cost. Every
implementation runs in processes of its own, rounds interleaved; all in fp32. Milliseconds of wall time: most of it is
spent waiting for memory.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.report import Answer, Row, Target, in_a_process, least, print_rows, publish, ratio, rows_of, target  # noqa: E402

RANK, SCALE = 16, 2.0
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CANARY = tuple(range(100, 132))
QUICKSTART_STEP_MS = 10_900.0
"""Sampling, grading, training and sync of one step, mean of seed 0 in the README's table."""
IMPLS = ("merged", "merged, gloo", "adapter", "vllm pack", "vllm reload", "disk adapter", "trl http")
PHASES = ("copy", "gather", "transfer", "fetch", "write", "kv", "install", "canary", "sync", "merged", "cosine")
CASES = {"smollm2-135m": 10, "qwen3-0.6b shape": 4}
"""The models, and the timed rounds of one process."""

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def prepare(case: str, folder: Path) -> Path:
    """The model's folder; the second one is random, of Qwen3-0.6B's shape."""
    if case == "smollm2-135m":
        from engine.recipe_file import load
        from engine.snapshot import resolve

        recipe = load(str(ROOT / "recipes" / "quickstart.toml"))
        return resolve(recipe.model.source, recipe.model.sha256).folder
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model in fp32, as a trainer holds it."""
    from safetensors.torch import load_file

    return {name: tensor.float() for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


def factors_of(model: Path, seed: int) -> Factors:
    """Random factors of every linear layer, small as an update is."""
    generator = torch.Generator().manual_seed(seed)
    made: Factors = {}
    for name, weight in weights_of(model).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in LEAVES:
            a = torch.randn(RANK, weight.shape[1], generator=generator)
            made[layer] = (a / a.shape[1] ** 0.5, 0.01 * torch.randn(weight.shape[0], RANK, generator=generator))
    return made


@contextmanager
def clock(answer: Answer, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    answer[phase] = 1e3 * (time.perf_counter() - start)


def ours(how: str, model: Path, rounds: int, threads: int) -> list[Answer]:
    """The real sampler process, driven from here as the trainer drives it."""
    from engine.rollout import Child, Sampler
    from engine.rollout.deliver import deliver
    from engine.rollout.messages import Installed, SamplerConfig
    from engine.sync import open_transport

    torch.set_num_threads(threads)
    way: Literal["gloo", "shared_memory"] = "gloo" if how.endswith("gloo") else "shared_memory"
    slots: dict[str, Any] = (
        {"install": "adapter", "lora_rank": RANK, "lora_targets": LEAVES} if how == "adapter" else {}
    )
    config = SamplerConfig(str(model), "float32", "cpu", 512, 16, 128, 0.5, 0, tokenizer=False, **slots)
    parameters = {name: tuple(map(torch.nn.Parameter, pair)) for name, pair in factors_of(model, 1).items()}
    flat = torch.cat([t.detach().flatten() for pair in parameters.values() for t in pair])
    elsewhere = torch.empty_like(flat)
    shapes = {n: tuple(t.shape for t in pair) for n, pair in parameters.items()}
    memory = open_transport(way, shapes, SCALE, "float32", "cpu")
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(config, Child("cpu", threads=threads, log=Path(folder) / "log"))
        try:
            sampler.wait_ready()
            sampler.bind(memory.address)
            for version in range(rounds + 2):  # the first two warm up
                answer: Answer = {}
                with torch.no_grad():
                    for pair in parameters.values():
                        pair[1].mul_(1.01)
                with clock(answer, "copy"):
                    elsewhere.copy_(flat)
                start = time.perf_counter()
                with clock(answer, "gather"):
                    gathered = {name: tuple(t.detach() for t in pair) for name, pair in parameters.items()}
                with clock(answer, "transfer"):
                    memory.write(gathered)
                with clock(answer, "install"):
                    [installed] = deliver(memory, [sampler], version)
                answer["sync"] = 1e3 * (time.perf_counter() - start)
                assert isinstance(installed, Installed)
                answer |= {phase: 1e3 * value for phase, value in installed.seconds.items()}
                with clock(answer, "canary"):
                    sampler.score(CANARY)
                answers.append(answer)
        finally:
            sampler.close()
            memory.close()
    return answers[2:]


def open_vllm(model: Path, **options: Any) -> Any:
    """vLLM in this process, with our worker extension."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=128 << 20,
        worker_extension_cls="engine.sync.extension.WorkerExtension",
        **options,
    )
    llm.collective_rpc("rlvr_open", args=(str(model),))
    return llm


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def timed(rounds: int, llm: Any, once: Callable[[], None], warm: int = 2) -> list[Answer]:
    """`once` and the drop of the old KV, after `warm` rounds that don't count."""
    answers: list[Answer] = []
    for _ in range(rounds + warm):
        answer: Answer = {}
        with clock(answer, "sync"):
            with clock(answer, "write"):
                once()
            llm.reset_prefix_cache()
        answers.append(answer)
    return answers[warm:]


def applied(llm: Any, model: Path, how: str) -> float:
    """Cosine of the update that vLLM's first layers compute with to s B A, by their answer to an identity."""
    from engine.sync import SharedTensors

    factors = factors_of(model, 2)
    memory = SharedTensors({n: (a.shape, b.shape) for n, (a, b) in factors.items()}, SCALE)
    llm.collective_rpc("rlvr_bind", args=(memory.address, how))
    vllm_model = worker_of(llm).model_runner.get_model()
    layer = next(name for name, _ in vllm_model.named_modules() if name.endswith("layers.1.mlp.down_proj"))
    a, b = factors[layer]
    seen = []
    for scale in (0.0, 1.0):
        memory.write({n: (x, scale * y) for n, (x, y) in factors.items()})
        llm.collective_rpc("rlvr_fetch", args=(None,))
        llm.collective_rpc("rlvr_install")
        module = vllm_model.get_submodule(layer)
        if how == "merged":
            seen.append(module.cpu_linear(torch.eye(a.shape[1]), module.weight, None).T.double())
        else:
            seen.append(module.lora_b_stacked[0][0, 0].double() @ module.lora_a_stacked[0][0, 0].double())
    memory.close()
    update, intended = (seen[1] - seen[0]).flatten(), (SCALE * b.double() @ a.double()).flatten()
    return float(torch.nn.functional.cosine_similarity(update, intended, dim=0))


def vllm_pack(model: Path, rounds: int) -> list[Answer]:
    """What vLLM does with the weights of these layers when it loads them, and our merged install beside it."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    llm = open_vllm(model)
    modules = [m for _, m in worker_of(llm).model_runner.get_model().named_modules() if hasattr(m, "cpu_linear")]
    layers = [
        (m, m.cpu_linear(torch.eye(m.input_size), m.weight, None).T.contiguous())
        for m in modules
        if m.weight.numel() == 0
    ]

    def once() -> None:
        for module, weight in layers:
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            dispatch_cpu_unquantized_gemm(module, remove_weight=True)

    cosine = applied(llm, model, "merged")  # which also binds the merged install, to measure it in this process too
    answers: list[Answer] = []
    for _ in range(rounds):
        [answer] = timed(1, llm, once, warm=0)
        with clock(answer, "merged"):
            llm.collective_rpc("rlvr_fetch", args=(None,))
            llm.collective_rpc("rlvr_install")
        answers.append(answer | {"cosine": cosine})
    return answers


def vllm_reload(model: Path, rounds: int) -> list[Answer]:
    """All weights through vLLM's own loader, from memory."""
    llm = open_vllm(model)
    weights = weights_of(model)
    return timed(
        rounds, llm, lambda: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    )


def disk_adapter(model: Path, rounds: int) -> list[Answer]:
    """Save the adapter, have vLLM read it again in place."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    llm = open_vllm(model, enable_lora=True, max_loras=1, max_lora_rank=RANK, lora_target_modules=list(LEAVES))
    cosine = applied(llm, model, "adapter")
    tensors: dict[str, torch.Tensor] = {}
    for name, (a, b) in factors_of(model, 1).items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    with tempfile.TemporaryDirectory() as folder:
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": list(LEAVES)}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))

        def once() -> None:
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))

        answers = timed(rounds, llm, once)
    return [answer | {"cosine": cosine} for answer in answers]


def trl_http(model: Path, rounds: int) -> list[Answer]:
    """Merge into the trainer's weights, post every tensor to the server, which loads it, unmerge."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    llm = open_vllm(model)
    runner = worker_of(llm).model_runner
    weights, factors = weights_of(model), factors_of(model, 1)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = bytearray(int(self.headers["Content-Length"]))
            view = memoryview(body)
            while view:
                view = view[self.rfile.readinto(view) :]
            name = self.path.removeprefix("/")
            value = torch.frombuffer(body, dtype=torch.float32).view(weights[name].shape)
            runner.get_model().load_weights([(name, value)])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def add(sign: float) -> None:
        for name, (a, b) in factors.items():
            weights[f"{name}.weight"].addmm_(b, a, alpha=sign * SCALE)

    def once() -> None:
        add(1.0)
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        initialize_layerwise_reload(runner.get_model())
        for name, weight in weights.items():
            connection.request("POST", f"/{name}", weight.numpy().tobytes())
            connection.getresponse().read()
        finalize_layerwise_reload(runner.get_model(), runner.model_config)
        connection.close()
        add(-1.0)

    answers = timed(rounds, llm, once)
    server.shutdown()
    return answers


def child(impl: str, model: Path, rounds: int, threads: int) -> list[Answer]:
    """The rounds of one implementation."""
    if impl in ("merged", "merged, gloo", "adapter"):
        return ours(impl, model, rounds, threads)
    torch.set_num_threads(threads)
    peers = {"vllm pack": vllm_pack, "vllm reload": vllm_reload, "disk adapter": disk_adapter, "trl http": trl_http}
    return peers[impl](model, rounds)


def targets_of(case: str, rows: list[Row]) -> list[Target]:
    """The least of each side: on a shared machine the best run is the least disturbed one."""

    def ms(impl: str, phase: str) -> float | None:
        return least(rows, case, impl, phase)

    def goal(name: str, over: tuple[str, str], under: tuple[str, str], limit: float, better: str) -> list[Target]:
        return target(f"{case}: {name}", ratio(ms(*over), ms(*under)), limit, better)

    goals = [
        *goal("adapter write / copy of the factors", ("adapter", "write"), ("adapter", "copy"), 3, "lower"),
        *goal("merged write / vLLM's packing alone", ("vllm pack", "merged"), ("vllm pack", "write"), 1.5, "lower"),
        *goal("transfer / copy of the factors", ("merged", "transfer"), ("merged", "copy"), 3, "lower"),
        *goal("TRL's way / merged", ("trl http", "sync"), ("merged", "sync"), 5, "higher"),
        *goal("TRL's way / adapter", ("trl http", "sync"), ("adapter", "sync"), 5, "higher"),
        *target(f"{case}: cosine, merged", ms("vllm pack", "cosine"), 0.999, "higher"),
        *target(f"{case}: cosine, adapter", ms("disk adapter", "cosine"), 0.999, "higher"),
    ]
    if case == "smollm2-135m":
        for impl in ("merged", "adapter"):
            share = ratio(ms(impl, "sync"), QUICKSTART_STEP_MS)
            goals += target(f"{case}: {impl} sync / quickstart step", share, 0.02, "lower")
    return goals


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--passes", type=int, default=2, help="processes of each implementation, interleaved")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", choices=IMPLS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({"rounds": child(options.child, options.model, options.rounds, options.threads)}))
        sys.stdout.flush()
        os._exit(0)  # vLLM's way out of the interpreter takes seconds
    rows: list[Row] = []
    targets: list[Target] = []
    notes: list[str] = [f"{options.threads} thread(s); cosine is a ratio, everything else milliseconds"]
    for case in options.cases:
        measured: dict[str, list[Answer]] = {impl: [] for impl in IMPLS}
        with tempfile.TemporaryDirectory() as folder:
            model = prepare(case, Path(folder))
            for _ in range(options.passes):
                for impl in IMPLS:
                    arguments = ["--child", impl, "--model", str(model), "--rounds", str(CASES[case])]
                    arguments += ["--threads", str(options.threads)]
                    answer = in_a_process(Path(__file__), arguments, threads=options.threads, limit=900)
                    if isinstance(answer, str):
                        notes.append(f"{case}, {impl}: not measured: {answer}")
                    else:
                        measured[impl] += answer["rounds"]
        units = dict.fromkeys(PHASES, "ms") | {"cosine": ""}
        ours_of_case = [row for impl, answers in measured.items() for row in rows_of(case, impl, units, answers)]
        print_rows(ours_of_case)
        rows += ours_of_case
        targets += targets_of(case, rows)
    publish("bench/sync.py", rows, targets, notes, options.json)


if __name__ == "__main__":
    main()
