"""vLLM's asynchronous engine, whose core is a process of its own: what CUDA uses, and a CPU where it is asked to.

The core schedules and computes without waiting for this process; what is asked of it is answered between two of its
steps. The event loop runs only inside this class's methods.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import vllm
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from engine.rollout.book import Book
from engine.rollout.messages import SamplerConfig, VllmLost
from engine.rollout.requests import (
    SCORE_PRIORITY,
    adapter_of,
    engine_arguments,
    require_alone,
    score_params,
    scores_of,
    slowest,
)
from engine.types import Completion

LISTEN_SECONDS = 0.01
"""How long `step` waits for a completion before the trainer's messages are looked at again."""
PULSE_SECONDS = 1.0
"""Between two questions whether the core still computes."""
LOOK_SECONDS = 0.5
"""Between two looks at whether the core is alive, while something is asked of it."""
_Result = TypeVar("_Result")


class AsyncEngine:
    """One vLLM with the weights of one policy version; `VllmEngine`'s methods, and the same answers.

    Every method raises VllmLost where vLLM's own process has ended.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self.version = vllm.__version__
        self.book = Book(text=config.tokenizer)
        self._config = config
        self._watching: set[asyncio.Task[None]] = set()
        self._adapter = adapter_of(config)
        self._loop = asyncio.new_event_loop()
        self._landed = asyncio.Event()
        self._heard = time.monotonic()
        self._engine = self._loop.run_until_complete(self._open())

    def step(self) -> list[Completion]:
        """The completions that have finished; waits a moment for one. Returns only while vLLM's core goes on."""
        self._run(self._advance())
        self._landed.clear()
        return self.book.take()

    def abort(self, groups: tuple[int, ...]) -> None:
        """Drop what is left of the groups; none of it comes out of `step` any more."""
        self._run(self._engine.abort(self.book.drop(groups)))

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-prob of every token but the first under the installed weights, at temperature 1.

        What is being sampled goes on meanwhile; RuntimeError where vLLM can't do both.
        """
        require_alone(self._config, self.book.unfinished)
        return self._run(self._score(token_ids))

    def bind(self, address: dict[str, Any]) -> int:
        """Attach to the trainer's tensors and find the place of each in the model; how many names were bound."""
        return int(min(self._run(self._engine.collective_rpc("rlvr_bind", args=(address, self._config.install)))))

    def fetch(self, meeting: dict[str, Any] | None) -> str:
        """Take what the trainer sends or has written; why a worker got nothing, or nothing. No weight changes."""
        return next(filter(None, self._run(self._engine.collective_rpc("rlvr_fetch", args=(meeting,)))), "")

    def install(self, version: int) -> dict[str, float]:
        """Write the fetched tensors into the model in place and drop the KV of the old weights; seconds by phase.

        Requests in the middle keep their tokens: the core stands still meanwhile, and computes them again under the
        new weights.
        """
        return self._run(self._install(version))

    async def _open(self) -> AsyncLLM:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self._config)))
        await engine.collective_rpc("rlvr_open", args=(self._config.model_dir,))
        await engine.update_weight_version("0")
        return engine

    async def _advance(self) -> None:
        for name, group, params in self.book.admit():
            await self._add(name, group.prompt_ids, params)
        if self.book.waiting:
            # Others wait for these prompts to be computed. The first answer may come before the step that does it.
            await self._pulse()
            await self._pulse()
        elif time.monotonic() - self._heard > PULSE_SECONDS:
            await self._pulse()
        try:
            await asyncio.wait_for(self._landed.wait(), LISTEN_SECONDS)
        except TimeoutError:
            pass  # nothing has landed: the trainer may want something

    async def _pulse(self) -> None:
        """Wait until the core is between two steps; for ever where it hangs, and then no heartbeat is sent either."""
        await self._engine.get_weight_version()
        self._heard = time.monotonic()

    async def _add(self, name: str, token_ids: tuple[int, ...], params: SamplingParams) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        # In their order, which the wall clock may not keep.
        answer = await self._engine.add_request(
            name, prompt, params, arrival_time=float(name), lora_request=self._adapter, priority=0
        )
        task = self._loop.create_task(self._watch(name, answer))
        self._watching.add(task)

    async def _watch(self, name: str, answer: Any) -> None:
        self.book.land(name, await answer.get())
        self._landed.set()

    async def _score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        name = self.book.name()
        [out] = [
            out
            async for out in self._engine.generate(
                prompt, score_params(), name, lora_request=self._adapter, priority=SCORE_PRIORITY
            )
        ]
        return scores_of(out, token_ids)

    async def _install(self, version: int) -> dict[str, float]:
        start = time.perf_counter()
        in_the_middle = self.book.sampling > 0
        if in_the_middle:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        seconds = slowest(await self._engine.collective_rpc("rlvr_install"))
        written = time.perf_counter()
        if not await self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(f"install of version {version}: vLLM did not drop its prefix cache")
        self.book.forget_cache()
        await self._engine.update_weight_version(str(version))
        if in_the_middle:
            await self._engine.resume_generation()
        return seconds | {"pause": paused - start, "kv": time.perf_counter() - written}

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self._loop.run_until_complete(self._alive(work))

    async def _alive(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What `work` gives; VllmLost where the core ends meanwhile, since not all of vLLM's waits see that."""
        task = self._loop.create_task(work)
        while True:
            done, _ = await asyncio.wait({task}, timeout=LOOK_SECONDS)
            if done and not self._engine.errored and (task.cancelled() or task.exception() is not None):
                await asyncio.sleep(LOOK_SECONDS)  # vLLM may fail what waits before it says that its core ended
            if self._engine.errored:
                task.cancel()
                await asyncio.gather(task, *self._watching, return_exceptions=True)
                raise VllmLost("vLLM's own process ended")
            if done:
                break
        for watching in [task for task in self._watching if task.done()]:
            self._watching.remove(watching)
            watching.result()
        return task.result()
