"""Log-probs as a user would be served them: a vLLM of its own, adapters loaded from their folders by name.

`serve` starts `python -m engine.rollout.served REQUEST ANSWER`, which loads the base with vLLM's own LoRA path and
scores each text alone. Nothing of the trainer's own way into vLLM takes part.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import RunError
from engine.rollout.link import child_environment
from engine.types import LORA_SLOTS

SERVE_SECONDS = 1800.0
KV_CACHE_BYTES = 256 << 20
_PR_SET_PDEATHSIG = 1

Scores = tuple[tuple[float, ...], ...]
"""Of each text, the log-prob of every token but the first."""


@dataclass(frozen=True, slots=True)
class Served:
    """What vLLM made of an adapter."""

    scores: Scores
    bound: tuple[str, ...]
    """Layers that its factors went into, as vLLM spells them; fused ones by their parts."""
    unplaced: tuple[str, ...]
    """Layers that it read and that its model does not have: vLLM drops them without a word."""
    refused: str = ""
    """Why vLLM would not load it; then there is nothing else."""


def serve(
    model: Path,
    adapters: Sequence[Path],
    texts: Sequence[Sequence[int]],
    *,
    rank: int,
    device: str,
    dtype: str,
    threads: int,
    scratch: Path,
) -> tuple[Scores, list[Served]]:
    """The log-probs of `texts` under the base alone, and under each adapter of at most `rank`.

    `scratch` is a folder for what the two processes exchange and for the child's log. Raises RunError where vLLM
    fails or hangs; the child and all that it started are gone afterwards.
    """
    request, answer, log = (scratch / name for name in ("request.json", "answer.json", "vllm.log"))
    slots = next((slot for slot in LORA_SLOTS if slot >= rank), None)
    if slots is None:
        raise RunError(f"an adapter of rank {rank}: vLLM's slots take at most {LORA_SLOTS[-1]}")
    request.write_text(
        json.dumps(
            {
                "model": str(model),
                "adapters": [str(path.resolve()) for path in adapters],
                "texts": [list(text) for text in texts],
                "rank": slots,
                "device": device,
                "dtype": dtype,
            }
        )
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.rollout.served", str(request), str(answer)],
            env=child_environment(device, threads),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=SERVE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunError(f"vLLM had not scored {len(texts)} texts after {SERVE_SECONDS:.0f} s") from None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it and all that it started have ended
            process.wait()
    if code != 0 or not answer.is_file():
        raise RunError(f"vLLM failed (exit {code}): {_last_error(log)}")
    base, *served = json.loads(answer.read_text())
    return _scores(base["scores"]), [
        Served(_scores(s["scores"]), tuple(s["bound"]), tuple(s["unplaced"]), s["refused"]) for s in served
    ]


def _scores(rows: list[list[float]]) -> Scores:
    return tuple(tuple(row) for row in rows)


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it wrote nothing"])[-1]


def main() -> None:
    """The child: read the request, write the answer."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request_path, answer_path = map(Path, sys.argv[1:])
    request = json.loads(request_path.read_text())
    from vllm import LLM

    longest = max(map(len, request["texts"])) + 1
    on_cpu = request["device"] == "cpu"
    memory: dict[str, Any] = {"kv_cache_memory_bytes": KV_CACHE_BYTES} if on_cpu else {}
    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        dtype=request["dtype"],
        max_model_len=longest,
        max_num_batched_tokens=max(2048, longest),
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=not on_cpu,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=request["rank"],
        disable_log_stats=True,
        **memory,
    )
    answer: list[dict[str, Any]] = [{"scores": [_score(llm, text, None) for text in request["texts"]]}]
    for number, path in enumerate(request["adapters"], start=1):
        answer.append(_served(llm, number, path, request["texts"]))
    answer_path.write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # the interpreter's way out through vLLM takes seconds


def _served(llm: Any, number: int, path: str, texts: list[list[int]]) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    lora = LoRARequest(f"adapter-{number}", number, path)
    try:
        llm.llm_engine.add_lora(lora)
    except Exception as error:  # of whatever kind, it is vLLM's answer to this adapter, and is reported as that
        return {"scores": [], "bound": [], "unplaced": [], "refused": f"{type(error).__name__}: {error}"}
    scores = [_score(llm, text, lora) for text in texts]
    bound, unplaced = llm.collective_rpc(_where, args=(number,))[0]
    return {"scores": scores, "bound": bound, "unplaced": unplaced, "refused": ""}


def _score(llm: Any, text: list[int], lora: Any) -> list[float]:
    """One text at a time: vLLM 0.32 adds a head's factors to a prompt's logits by the rows of what is sampled."""
    from vllm import TokensPrompt

    from engine.rollout.requests import score_params, scores_of

    [out] = llm.generate(TokensPrompt(prompt_token_ids=text), score_params(), lora_request=lora, use_tqdm=False)
    return list(scores_of(out, text))


def _where(worker: Any, number: int) -> tuple[list[str], list[str]]:
    """Inside vLLM's worker: the adapter's layers with a place in the model, and those without."""
    manager = worker.model_runner.lora_manager._adapter_manager
    bound: list[str] = []
    unplaced: list[str] = []
    for name, weights in manager.get_adapter(number).loras.items():
        parts = [name]
        if name in manager.packed_modules and isinstance(weights.lora_a, list):
            pairs = zip(manager.packed_modules[name], weights.lora_a, strict=False)
            parts = [part for part, a in pairs if a is not None]
        (bound if name in manager.modules else unplaced).extend(parts)
    return bound, unplaced


if __name__ == "__main__":
    main()
