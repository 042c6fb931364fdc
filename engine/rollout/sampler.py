"""The trainer's handle on one sampler process, wherever that runs."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from engine.errors import RunError
from engine.rollout.link import Link
from engine.rollout.messages import (
    Abort,
    Beat,
    Bind,
    Bound,
    Failed,
    Group,
    Install,
    Installed,
    Landed,
    Ready,
    SamplerConfig,
    Score,
    Scored,
    Submit,
)
from engine.types import Completion

LOAD_SECONDS = 600.0
ANSWER_SECONDS = 300.0
LANDED_SECONDS = 1800.0
"""Between two completions: a long one takes minutes, and a sampler that hangs is found by its heartbeat."""
CLOSE_SECONDS = 5.0
_Answer = TypeVar("_Answer", Ready, Bound, Installed, Scored)
_NUMBERS = itertools.count(1)


class SamplerError(RunError):
    """A sampler could not do what it was asked, and would not be able to if it were asked again."""


class SamplerLost(SamplerError):
    """A sampler process died, hangs or did not answer in time: another one in its place may do better."""


class Gone:
    """What the inbox gets after a sampler's last message."""


Inbox = queue.SimpleQueue[tuple["Sampler", Landed | Beat | Gone]]


class Sampler:
    """One vLLM in a process of its own, driven through `link`. It starts loading at once; `wait_ready` waits for it.

    A thread reads all that it sends, so that it never waits for the trainer: completions and heartbeats go to `inbox`,
    which several samplers may share, answers to whoever asked.
    Every method that waits has a deadline and raises SamplerLost, naming what it waited for; SamplerError where the
    sampler itself reports why it can't.
    """

    def __init__(self, config: SamplerConfig, link: Link, inbox: Inbox | None = None) -> None:
        self._link = link
        self.inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self.number = next(_NUMBERS)
        """Of no other sampler of this process, before or after."""
        self.heard = time.monotonic()
        """When it last sent anything."""
        self.beat = Beat(0, 0, 0, 0.0, 0.0)
        """Its last heartbeat."""
        self.workers = config.tensor_parallel
        """Of its vLLM; each of them takes part in a transfer."""
        self._closed = False
        self._failure: Failed | None = None
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="sampler-reader", daemon=True)
        self._reader.start()
        self.send(config)

    @property
    def pid(self) -> int:
        """Of the process, which leads a process group of its own."""
        return self._link.pid

    @property
    def place(self) -> str:
        """Where it runs, for a person."""
        return self._link.place

    @property
    def gone(self) -> bool:
        """It has ended."""
        return self._link.gone

    def wait_ready(self, seconds: float = LOAD_SECONDS) -> Ready:
        """Wait until the model is loaded."""
        return self.answer(Ready, "loading its model", seconds)

    def ready(self) -> Ready | None:
        """The answer of `wait_ready` where it has come. One that still waits for room may do so for as long as it
        takes."""
        if not self._answers.empty():
            return self.answer(Ready, "loading its model", 0.0)
        if not self._link.placed:
            self.heard = time.monotonic()
        elif time.monotonic() - self.heard > LOAD_SECONDS:
            raise self._late("loading its model", LOAD_SECONDS)
        return None

    def submit(self, groups: Sequence[Group]) -> None:
        """Queue groups for sampling."""
        self.send(Submit(tuple(groups)))

    def abort(self, groups: Sequence[int]) -> None:
        """Drop what is left of groups; what has landed already may still come."""
        self.send(Abort(tuple(groups)))

    def landed(self, count: int, deadline_seconds: float = LANDED_SECONDS) -> Iterator[Completion]:
        """The next `count` completions of the inbox, each as it finishes; the deadline holds between two of them."""
        for number in range(1, count + 1):
            what, deadline = f"completion {number} of {count}", time.monotonic() + deadline_seconds
            while True:
                try:
                    _, message = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise self._late(what, deadline_seconds) from None
                if isinstance(message, Gone):
                    raise self.lost(what)
                if isinstance(message, Landed):
                    yield message.completion
                    break

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """The sampler's log-probs of a text's tokens but the first, at temperature 1."""
        self.send(Score(token_ids))
        return self.answer(Scored, "the canary's log-probs").logprobs

    def bind(self, address: dict[str, Any]) -> int:
        """Tell it where the trainer's tensors stand; how many names found their place."""
        self.send(Bind(address))
        return self.answer(Bound, "binding the trainer's tensors").names

    def install(self, version: int) -> dict[str, float]:
        """Have it take over what stands in shared memory as `version`; its seconds by phase. See also `deliver`."""
        self.send(Install(version))
        return self.answer(Installed, f"the install of version {version}").seconds

    def send(self, message: object) -> None:
        """Send a message; raises SamplerLost where the process is gone or reads nothing."""
        try:
            self._link.send(message)
        except OSError as error:
            raise self.lost(f"sending {type(message).__name__}") from error

    def answer(self, kind: type[_Answer], what: str, seconds: float = ANSWER_SECONDS) -> _Answer:
        """Wait for its next answer, which must be a `kind`."""
        try:
            message = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise self._late(what, seconds) from None
        if isinstance(message, Gone):
            self._answers.put(message)  # for the next one who asks
            raise self.lost(what)
        if not isinstance(message, kind):
            raise SamplerError(f"the sampler sent {type(message).__name__} while the trainer waited for {what}")
        return message

    def lost(self, what: str) -> SamplerError:
        """The error that says how the process ended while the trainer waited for `what`."""
        if self._failure is not None:
            kind = SamplerLost if self._failure.again else SamplerError
            return kind(f"the sampler failed at {what}: {self._failure.reason}; its log: {self._link.log}")
        how = self._link.end()
        if not how:
            return SamplerLost(f"the sampler closed its pipe at {what}; its log: {self._link.log}")
        return SamplerLost(f"the sampler {how} while the trainer waited for {what}; its log: {self._link.log}")

    def hang_up(self) -> None:
        """Have the process end by itself; `close` waits for that."""
        self._link.hang_up()

    def close(self, grace_seconds: float = CLOSE_SECONDS) -> None:
        """End the process and all that it started; does nothing when it is closed already."""
        if not self._closed:
            self._closed = True
            self._link.close(grace_seconds)
            self._reader.join()
            self._link.free()

    def _read(self) -> None:
        try:
            while True:
                message = self._link.receive()
                self.heard = time.monotonic()
                match message:
                    case Landed():
                        self.inbox.put((self, message))
                    case Beat():
                        self.beat = message
                        self.inbox.put((self, message))
                    case Failed():
                        self._failure = message
                    case answer:
                        self._answers.put(answer)
        except (EOFError, OSError):
            pass  # it is gone, or has been hung up on
        finally:
            self._answers.put(Gone())
            self.inbox.put((self, Gone()))

    def _late(self, what: str, seconds: float) -> SamplerLost:
        silent = time.monotonic() - self.heard
        return SamplerLost(
            f"waited {seconds:.0f} s for {what}; last heard from it {silent:.0f} s ago; its log: {self._link.log}"
        )
