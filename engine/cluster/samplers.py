"""Samplers on the nodes of a Ray cluster: the driver's ends of their links."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from engine.cluster.node import ENVIRONMENT, alive, reason_of
from engine.cluster.sampler_actor import Ended, Placed, SamplerActor
from engine.recipe import Recipe
from engine.rollout.messages import Install

CLOSE_SECONDS = 25.0
"""For a sampler that ends by itself, with all that it started."""
ASKED, ASK_SECONDS = 60, 2.0
"""How often Ray is asked for a place before the last answer is believed, and how long after the last time: by then it
knows which nodes are dead."""


class ActorLink:
    """The driver's hold on a sampler process somewhere in the cluster. Ray finds the place; it may have to wait."""

    def __init__(self, ask: Callable[[], Any], log: Path) -> None:
        """ask: asks Ray for a SamplerActor. log: gets what the process writes there."""
        self._ask = ask
        self._actor = ask()
        self._asked = 1
        self._sent: list[tuple[Any, ...]] = []
        """Until it has a place: what another actor must be told."""
        self._numbers = itertools.count()
        self._file: IO[bytes] = log.open("ab")
        self._said: deque[object] = deque()
        self._closing: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._how = ""
        self.log = log
        self.pid = 0
        self.place = "a node to come"

    @property
    def placed(self) -> bool:
        """Its process has been started."""
        return self.pid != 0

    @property
    def gone(self) -> bool:
        """Its process has ended, or its actor, or its node."""
        return bool(self._how)

    def send(self, message: object) -> None:
        """Hand it a message. Raises ConnectionError where it is gone."""
        if self._how:
            raise ConnectionError(self._how)
        stored = None
        if isinstance(message, Install) and message.meeting is not None:
            stored, message = message.meeting["stored"], Install(message.version)  # by itself, for Ray to fetch it
        with self._lock:
            sent = next(self._numbers), message, stored
            if not self.placed:
                self._sent.append(sent)
            self._actor.send.remote(*sent)

    def receive(self) -> object:
        """Its next message. Raises EOFError once it is gone."""
        while not self._said:
            if self._how:
                raise EOFError(self._how)
            try:
                said, written = ray.get(self._actor.receive.remote())
            except (RayActorError, RayTaskError) as error:
                if self.placed or self._closed or self._asked == ASKED:
                    self._how = f"is gone: {reason_of(error)}"
                else:  # Ray chose a node that had just died, and did not know it yet
                    time.sleep(ASK_SECONDS)
                    self._ask_again()
                continue
            self._said += said
            self._file.write(written)
            self._file.flush()
        match self._said.popleft():
            case Placed(node, pid):
                found = alive().get(node)
                self.pid, self.place = pid, f"node {found.name if found else node}"
                self._sent.clear()
                return self.receive()
            case Ended(how):
                self._how = how
                raise EOFError(how)
            case message:
                return message

    def _ask_again(self) -> None:
        with self._lock:
            if not self._closed:
                self._asked += 1
                self._actor = self._ask()
                for sent in self._sent:
                    self._actor.send.remote(*sent)

    def end(self) -> str:
        """How it ended; empty where it has not."""
        return self._how

    def hang_up(self) -> None:
        """Have it end by itself."""
        if self._closing is None and self.placed and not self._how:
            self._closing = self._actor.close.remote(0.0)

    def close(self, grace_seconds: float) -> None:
        """End its process with all that it started, and its actor. A hung or lost one is killed where it is."""
        if grace_seconds > 0:
            self.hang_up()
            if self._closing is not None:
                try:
                    ray.get(self._closing, timeout=CLOSE_SECONDS)
                except (RayActorError, RayTaskError, GetTimeoutError):
                    pass  # then it goes by force
        with self._lock:
            self._closed = True
            # The kernel ends the process with the actor, and the process's own child all that is below it.
            ray.kill(self._actor)

    def free(self) -> None:
        """Close the log."""
        self._file.close()


def actors(recipe: Recipe, *, threads: int, logs: list[Path]) -> Callable[[int], ActorLink]:
    """Starts the sampler of a number on whatever node has room for it, now or later, with its log here."""
    cluster = recipe.cluster
    assert cluster is not None
    on_cpu = recipe.rollout.devices[0] == "cpu"
    make: Any = ray.remote(SamplerActor)
    placed = make.options(
        num_cpus=cluster.sampler_cpus if on_cpu else 0,
        num_gpus=0 if on_cpu else recipe.rollout.tensor_parallel,
        scheduling_strategy="SPREAD",
        max_restarts=0,  # another one is started from here, with the weights of now
        max_concurrency=8,  # receive waits; send, close and Ray's own must not
        runtime_env={"env_vars": ENVIRONMENT},
    )
    model = recipe.model
    return lambda number: ActorLink(lambda: placed.remote(model.source, model.sha256, threads), logs[number])
