"""Graders on the nodes of a Ray cluster, with the face of one `Grader`."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from engine.cluster.grader_actor import Answer, GraderActor, State
from engine.cluster.node import ENVIRONMENT, alive, reason_of
from engine.cluster.slots import Call, GraderStats, Program, Slot
from engine.errors import RunError
from engine.recipe import Cluster, Reward, Sandbox
from engine.types import Completion, Graded, Task
from sandbox import SandboxError

START_SECONDS = 180.0
"""For every grader to be placed and to have tried its jails."""
LOOK_SECONDS = 0.5
PING_SECONDS = 10.0
HANG_SECONDS = 60.0
"""Without an answer from a grader that is asked how it is."""
GRADED_SECONDS = 3600.0
"""For one program with its turn, its cases and its retries."""
NONE_SECONDS = 300.0
"""Without any grader while programs wait."""
CLOSE_SECONDS = 40.0
LOSSES = 3
"""Graders that may be lost under one program before it is given up: it might be what ends them."""
KEPT_TASKS = 256
"""Tasks whose tests stay in Ray's object store for the next completion."""


@dataclass(frozen=True, slots=True)
class _Graded:
    slot: Slot
    call: int
    answer: Future[Answer]


@dataclass(frozen=True, slots=True)
class _Said:
    slot: Slot
    life: int
    answer: Future[State]


class Graders:
    """cluster.graders of them, each an actor that Ray places on a node, spread over nodes, with a jail pool there.

    A program goes to the grader that has fewest, none has more than twice what it judges at once, and the others wait
    here in their order. A program that one machine can't judge goes to another; it fails where all have. A grader
    that is lost is restarted by Ray where there is room, now or when a node joins, and its programs go to others;
    each program's result counts once. Made in a process that has joined the cluster. say: takes a line for the log.
    Raises RunError where no node can judge programs as `sandbox` requires.
    """

    def __init__(self, cluster: Cluster, sandbox: Sandbox, reward: Reward, say: Callable[[str], object]) -> None:
        workers = sandbox.workers or cluster.grader_cpus
        self.bound = 2 * workers
        """Programs that one grader has at most."""
        self._say = say
        self._moved = 0
        self._calls = itertools.count()
        self._waiting: deque[Program] = deque()
        self._tasks: OrderedDict[str, tuple[Task, Any]] = OrderedDict()
        self._inbox: queue.SimpleQueue[Program | _Graded | _Said | None] = queue.SimpleQueue()
        self._closed = False
        self._started: Future[None] = Future()
        self._heard_any = self._looked = time.monotonic()
        make: Any = ray.remote(GraderActor)
        placed = make.options(
            num_cpus=cluster.grader_cpus,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_concurrency=self.bound + 8,  # what it is asked beside grading must never wait
            runtime_env={"env_vars": ENVIRONMENT},
        )
        theirs = sandbox.model_copy(update={"workers": workers})
        self._slots = [Slot(number, placed.remote(theirs, reward)) for number in range(cluster.graders)]
        self._thread = threading.Thread(target=self._work, name="graders", daemon=True)
        self._thread.start()
        try:
            self._started.result(timeout=START_SECONDS)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                late = ", ".join(slot.title for slot in self._slots if slot.state in ("starting", "down"))
                raise RunError(
                    f"waited {START_SECONDS:.0f} s for {late} of {cluster.graders} to find {cluster.grader_cpus} cores "
                    f"each and to try the jails there; `ray status` shows what else has the cluster's cores"
                ) from None
            raise

    def submit(self, task: Task, completion: Completion, opening: str = "") -> Future[Graded]:
        """Grade in the background; opening: the answer's beginning, which the prompt already holds.

        The future raises SandboxError where no node could judge the program, RunError where no grader is left.
        """
        if self._closed:
            raise ValueError("the graders are closed")
        program = Program(task, completion, opening, Future())
        self._inbox.put(program)
        return program.future

    @property
    def infra_retries(self) -> int:
        """Programs that had to be run again because a machine, not the program, failed."""
        return self._moved + sum(slot.retries + slot.earlier_retries for slot in self._slots)

    def stats(self) -> list[GraderStats]:
        """Of each grader."""
        return [GraderStats(s.node, s.state, s.pid, s.programs, len(s.calls), s.most, s.life) for s in self._slots]

    def close(self) -> None:
        """End every grader with its jails; what is still being graded is given up."""
        self._inbox.put(None)
        self._thread.join()
        if self._closed or not ray.is_initialized():  # without the driver's connection the actors have gone
            return
        self._closed = True
        closing = {slot.actor.close.remote(): slot for slot in self._slots if slot.state == "up"}
        _, late = ray.wait(list(closing), num_returns=len(closing), timeout=CLOSE_SECONDS) if closing else ([], [])
        for answer in late:
            self._say(f"{closing[answer].title} did not close its jails in {CLOSE_SECONDS:.0f} s and is ended")
        for slot in self._slots:
            ray.kill(slot.actor, no_restart=True)
            slot.state, slot.calls = "down", {}

    def _work(self) -> None:
        """The one thread that touches slots and programs; Ray's threads only leave messages."""
        try:
            for slot in self._slots:
                self._ask(slot)
            while True:
                try:
                    message = self._inbox.get(timeout=LOOK_SECONDS)
                    if message is None:
                        return
                    self._take(message)
                except queue.Empty:
                    pass
                if time.monotonic() - self._looked >= LOOK_SECONDS:
                    self._look()
                self._place()
        except BaseException as error:  # it belongs to whoever waits for a program
            if not self._started.done():
                self._started.set_exception(error)
            self._refuse_all(error)
        finally:
            for program in self._programs():
                program.future.cancel()

    def _take(self, message: object) -> None:
        match message:
            case Program():
                self._waiting.append(message)
            case _Graded(slot, call, answer):
                self._land(slot, call, answer)
            case _Said(slot, life, said) if life == slot.life:
                self._hear(slot, said)

    def _refuse_all(self, error: BaseException) -> None:
        """Every program fails with `error`, also those that are still to come, until `close`."""
        for program in self._programs():
            _fail(program, error)
        self._waiting.clear()
        for slot in self._slots:
            slot.calls.clear()
        while (message := self._inbox.get()) is not None:
            if isinstance(message, Program):
                _fail(message, error)

    def _programs(self) -> list[Program]:
        return [*self._waiting, *(call.program for slot in self._slots for call in slot.calls.values())]

    def _ask(self, slot: Slot) -> None:
        slot.asked, life = time.monotonic(), slot.life
        answer = slot.actor.state.remote()
        answer.future().add_done_callback(lambda done: self._inbox.put(_Said(slot, life, done)))

    def _hear(self, slot: Slot, answer: Future[State]) -> None:
        """What a grader says of itself, or that Ray can't ask it."""
        slot.asked = None
        error = answer.exception()
        if isinstance(error, ActorDiedError) or (error and not isinstance(error, RayActorError)):
            # Its constructor raised: a fault of this code or of the node's Python, which a restart would not mend.
            self._lose(slot, reason_of(error))
            self._refuse(slot, reason_of(error))
        elif error:
            if slot.state == "up":
                self._lose(slot, reason_of(error))
            slot.why = reason_of(error)
        else:
            self._know(slot, answer.result())
        if all(slot.state in ("up", "refused") for slot in self._slots) and not self._started.done():
            self._started.set_result(None)

    def _know(self, slot: Slot, state: State) -> None:
        if state.node != slot.node_id:
            node = alive().get(state.node)
            slot.node_id, slot.node = state.node, node.name if node else state.node
        slot.pid, slot.heard = state.pid, time.monotonic()
        if state.refused:
            self._refuse(slot, state.refused)
            ray.kill(slot.actor, no_restart=True)
        elif slot.state != "up":
            if slot.life:
                self._say(f"{slot.title} is up, restarted {slot.life} times")
            slot.state = "up"

    def _refuse(self, slot: Slot, why: str) -> None:
        slot.state, slot.why = "refused", why
        self._say(f"{slot.title} is refused: {why}")
        if all(other.state == "refused" for other in self._slots):
            said = "; ".join(f"{other.title}: {other.why}" for other in self._slots)
            raise RunError(f"no node can judge programs as the recipe requires: {said}")

    def _land(self, slot: Slot, number: int, answer: Future[Answer]) -> None:
        call = slot.calls.get(number)
        if call is None:
            return  # its grader was lost meanwhile, and another one has the program
        program, error = call.program, answer.exception()
        if isinstance(error, RayActorError):
            self._lose(slot, reason_of(error))
            return
        del slot.calls[number]
        if error is not None:
            cause = error.cause if isinstance(error, RayTaskError) else error
            _fail(program, cause)
            return
        said = answer.result()
        slot.retries, slot.most = said.infra_retries, max(slot.most, said.most)
        if said.graded is None:
            program.failed[slot.key] = f"{slot.title}: {said.why}"
            self._moved += 1
            self._waiting.appendleft(program)
            return
        slot.programs += 1
        if program.future.set_running_or_notify_cancel():
            program.future.set_result(replace(said.graded, completion=program.completion))

    def _lose(self, slot: Slot, why: str) -> None:
        """A grader is gone: its programs go to others, and Ray starts it again where it can."""
        if slot.state == "up":
            self._say(f"{slot.title} is lost with {len(slot.calls)} programs: {why}")
        slot.state, slot.why, slot.asked = "down", why, None
        slot.life += 1
        slot.earlier_retries, slot.retries = slot.earlier_retries + slot.retries, 0
        lost = [call.program for _, call in sorted(slot.calls.items())]
        slot.calls = {}
        self._moved += len(lost)
        for program in reversed(lost):
            program.losses += 1
            if program.losses < LOSSES:
                self._waiting.appendleft(program)
            else:
                _fail(
                    program, SandboxError(f"task {program.task.id}: {LOSSES} graders were lost under it, last: {why}")
                )

    def _look(self) -> None:
        """See to graders that hang or are down, and to programs that nobody can take."""
        now = self._looked = time.monotonic()
        for slot in self._slots:
            oldest = next(iter(slot.calls.values()), None)
            if slot.state == "up" and slot.asked is not None and now - slot.asked > HANG_SECONDS:
                self._end(slot, f"no sign of life for {now - slot.heard:.0f} s")
            elif oldest is not None and now - oldest.since > GRADED_SECONDS:
                self._end(slot, f"a program of task {oldest.program.task.id} was there for {GRADED_SECONDS:.0f} s")
            elif slot.asked is None and (slot.state in ("starting", "down") or _quiet(slot, now)):
                self._ask(slot)
        if not self._waiting or any(slot.state == "up" for slot in self._slots):
            self._heard_any = now
        elif now - self._heard_any > NONE_SECONDS and self._started.done():
            said = "; ".join(f"{slot.title}: {slot.why}" for slot in self._slots)
            raise RunError(f"waited {NONE_SECONDS:.0f} s for a grader, {len(self._waiting)} programs wait; {said}")

    def _end(self, slot: Slot, why: str) -> None:
        ray.kill(slot.actor, no_restart=False)
        self._lose(slot, why)

    def _place(self) -> None:
        """Give what waits to graders that have room, oldest first."""
        up = [slot for slot in self._slots if slot.state == "up"]
        stay = []
        while self._waiting and (free := [slot for slot in up if len(slot.calls) < self.bound]):
            program = self._waiting.popleft()
            untried = [slot for slot in free if slot.key not in program.failed]
            if program.future.cancelled():
                continue
            if untried:
                nodes = {slot.node for slot in up if slot.key in program.failed}
                self._give(min(untried, key=lambda slot: (slot.node in nodes, len(slot.calls))), program)
            elif all(slot.key in program.failed for slot in up):
                said = "; ".join(program.failed.values())
                _fail(program, SandboxError(f"task {program.task.id}: no node could judge an answer to it: {said}"))
            else:
                stay.append(program)
        self._waiting.extendleft(reversed(stay))

    def _give(self, slot: Slot, program: Program) -> None:
        number = next(self._calls)
        # Only its text is graded; the token ids stay here.
        text = replace(program.completion, prompt_ids=(), token_ids=(), logprobs=())
        answer = slot.actor.grade.remote(self._sent(program.task), text, program.opening)
        slot.calls[number] = Call(program, time.monotonic(), answer)
        answer.future().add_done_callback(lambda done: self._inbox.put(_Graded(slot, number, done)))

    def _sent(self, task: Task) -> Any:
        """A task's tests in Ray's object store, from where a node fetches them once."""
        there = self._tasks.get(task.id)
        if there is None or there[0] != task:
            there = self._tasks[task.id] = task, ray.put(replace(task, prompt="", reference=None))
            if len(self._tasks) > KEPT_TASKS:
                self._tasks.popitem(last=False)  # a call that needs it still holds it
        self._tasks.move_to_end(task.id)
        return there[1]


def _quiet(slot: Slot, now: float) -> bool:
    return slot.state == "up" and now - slot.heard > PING_SECONDS


def _fail(program: Program, error: BaseException) -> None:
    if program.future.set_running_or_notify_cancel():
        program.future.set_exception(error)
