"""What runs on a grader's node: an ordinary `Grader` in a Ray actor."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import ray

from engine.recipe import Reward, Sandbox
from engine.reward import Grader
from engine.types import Completion, Graded, Task
from sandbox import SandboxError


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one program: graded, or why this machine could not; and what its grader has counted so far."""

    graded: Graded | None
    why: str
    infra_retries: int
    most: int
    """Programs that the grader had at once at most."""


@dataclass(frozen=True, slots=True)
class State:
    """Where a grader is and how it does."""

    node: str
    """The node's id."""
    pid: int
    refused: str
    """Why jails do not work there as the recipe requires; empty where they do."""


class GraderActor:
    """A grader with a jail pool of its own. Its methods are coroutines, so that it says how it is while it grades."""

    def __init__(self, sandbox: Sandbox, reward: Reward) -> None:
        # Kept and not raised: Ray would end the actor and say it in a traceback.
        self._refused = ""
        self._grader: Grader | None = None
        self._had = self._most = 0
        try:
            self._grader = Grader(sandbox, reward)
        except SandboxError as error:
            self._refused = str(error)

    async def state(self) -> State:
        """How it is; answers only once its self-test is done."""
        return State(ray.get_runtime_context().get_node_id(), os.getpid(), self._refused)

    async def grade(self, task: Task, completion: Completion, opening: str) -> Answer:
        """Grade; a machine that can't is an answer, not an exception."""
        assert self._grader is not None, self._refused
        self._had += 1
        self._most = max(self._most, self._had)
        try:
            graded = await asyncio.wrap_future(self._grader.submit(task, completion, opening))
            return Answer(graded, "", self._grader.infra_retries, self._most)
        except SandboxError as error:
            return Answer(None, str(error), self._grader.infra_retries, self._most)
        finally:
            self._had -= 1

    async def close(self) -> None:
        """End its jails; what is being graded is given up."""
        if self._grader is not None:
            await asyncio.to_thread(self._grader.close)
