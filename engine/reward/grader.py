"""Grades completions while others are still being sampled: the jail pool on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from engine import recipe as recipes
from engine.reward.extract import extract_program
from engine.reward.parts import REWARD_PARTS, reward_of
from engine.types import Completion, Graded, Task
from sandbox import Limits, Pool, Verdict

CLOSE_SECONDS = 30.0


class Grader:
    """Starts the pool at once and raises what its self-test raises; `close` ends every jail."""

    def __init__(self, sandbox: recipes.Sandbox, reward: recipes.Reward) -> None:
        self._weights = {name: getattr(reward, name) for name in REWARD_PARTS}
        self._thought = reward.require_thought
        self._stop_at_first_failure = reward.share == 0
        self._limits = Limits(
            cpu_seconds=sandbox.cpu_seconds,
            program_cpu_seconds=sandbox.program_cpu_seconds,
            memory_mb=sandbox.memory_mb,
            output_bytes=sandbox.output_bytes,
            processes=sandbox.processes,
            tmp_mb=sandbox.tmp_mb,
        )
        self._pool = Pool(
            sandbox.workers or len(os.sched_getaffinity(0)),
            python=sandbox.python,
            numpy=sandbox.numpy,
            require=sandbox.require,
        )
        self._grading: set[asyncio.Task[Graded]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grader", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._pool.__aenter__(), self._loop).result()
        except BaseException:
            self._stop_loop()
            raise

    def submit(self, task: Task, completion: Completion, opening: str = "") -> Future[Graded]:
        """Grade in the background; opening: the answer's beginning, which the prompt already holds.

        The future raises SandboxError where the machine can't run jails.
        """
        return asyncio.run_coroutine_threadsafe(self._tracked(task, completion, opening), self._loop)

    @property
    def infra_retries(self) -> int:
        """Programs that had to be run again because the machine, not the program, failed."""
        return self._pool.stats.infra_retries

    def close(self) -> None:
        """End the pool and its thread; what is still being graded is given up."""
        if self._loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=CLOSE_SECONDS)
        finally:
            self._stop_loop()

    async def _shut(self) -> None:
        for task in self._grading:
            task.cancel()
        await asyncio.gather(*self._grading, return_exceptions=True)
        await self._pool.__aexit__(None, None, None)

    async def _tracked(self, task: Task, completion: Completion, opening: str) -> Graded:
        work = asyncio.ensure_future(self._grade(task, completion, opening))
        self._grading.add(work)
        work.add_done_callback(self._grading.discard)
        return await work

    async def _grade(self, task: Task, completion: Completion, opening: str) -> Graded:
        program, reason = program_of(task, opening + completion.text, thinking=self._thought)
        if program is None:
            verdict = Verdict("NO_CODE", 0, 1, detail=reason)
        else:
            verdict = await self._pool.grade(
                program,
                task.tests,
                task.limits or self._limits,
                stop_at_first_failure=self._stop_at_first_failure,
            )
        reward, parts = reward_of(verdict, self._weights)
        return Graded(completion, program, verdict, reward, parts)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def program_of(task: Task, text: str, *, thinking: bool = False) -> tuple[str | None, str]:
    """The program of an answer and where it was found: what the task's starter begins, or the last code block.

    thinking: what stands before a closed `</think>`, or all if there is none, is no answer.
    """
    if task.starter:
        return f"{task.starter}{text}\n", "the starter and the answer"
    found = extract_program(text, thinking=thinking)
    return found.program, found.reason
