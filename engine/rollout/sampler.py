"""The trainer's handle on one sampler process."""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

from engine.errors import RunError
from engine.rollout.group import await_end
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
SEND_SECONDS = 60.0
"""A sampler that reads nothing for so long, with its socket full, is dead."""
GROUP_SECONDS = 15.0
"""For the processes below a sampler, once it has ended."""
_Answer = TypeVar("_Answer", Ready, Bound, Installed, Scored)


class SamplerError(RunError):
    """A sampler could not do what it was asked, and would not be able to if it were asked again."""


class SamplerLost(SamplerError):
    """A sampler process died, hangs or did not answer in time: another one in its place may do better."""


class Gone:
    """What the inbox gets after a sampler's last message."""


Inbox = queue.SimpleQueue[tuple["Sampler", Landed | Beat | Gone]]


class Sampler:
    """One vLLM in a process of its own. It starts loading at once; `wait_ready` waits for it.

    `log` is where the process's own output goes. A thread reads all that it sends, so that it never waits for the
    trainer: completions and heartbeats go to `inbox`, which several samplers may share, answers to whoever asked.
    Every method that waits has a deadline and raises SamplerLost, naming what it waited for; SamplerError where the
    sampler itself reports why it can't.
    """

    def __init__(self, config: SamplerConfig, *, threads: int, log: Path, inbox: Inbox | None = None) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_SECONDS), 0))
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._log_path = log
        self._log: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.rollout.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=child_environment(config.device, threads),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        self.inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self.heard = time.monotonic()
        """When it last sent anything."""
        self.beat = Beat(0, 0, 0, 0.0, 0.0)
        """Its last heartbeat."""
        self.workers = config.tensor_parallel
        """Of its vLLM; each of them takes part in a transfer."""
        self._failure: Failed | None = None
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="sampler-reader", daemon=True)
        self._reader.start()
        self.send(config)

    @property
    def pid(self) -> int:
        """Of the process, which leads a process group of its own."""
        return self._process.pid

    @property
    def gone(self) -> bool:
        """It has ended."""
        return self._process.poll() is not None

    def wait_ready(self, seconds: float = LOAD_SECONDS) -> Ready:
        """Wait until the model is loaded."""
        return self.answer(Ready, "loading its model", seconds)

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
            self._connection.send(message)
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
            return kind(f"the sampler failed at {what}: {self._failure.reason}; its log: {self._log_path}")
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return SamplerLost(f"the sampler closed its pipe at {what}; its log: {self._log_path}")
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return SamplerLost(f"the sampler {how} while the trainer waited for {what}; its log: {self._log_path}")

    def hang_up(self) -> None:
        """Close the socket, on which the process ends by itself once it reads; `close` waits for that."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has hung up already, or `close` has been here

    def close(self, grace_seconds: float = 5.0) -> None:
        """End the process and all that it started; does nothing when it is closed already."""
        if self._connection.closed:
            return
        self.hang_up()
        try:
            self._process.wait(timeout=grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it is in the middle of something
            self._process.wait()
        if not await_end(self._process.pid, GROUP_SECONDS):  # what it started goes with it, see the worker
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it went just now
        self._reader.join()
        self._connection.close()
        self._socket.close()
        self._log.close()

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv()
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
            pass  # it is gone, or `hang_up` closed the socket
        finally:
            self._answers.put(Gone())
            self.inbox.put((self, Gone()))

    def _late(self, what: str, seconds: float) -> SamplerLost:
        silent = time.monotonic() - self.heard
        return SamplerLost(
            f"waited {seconds:.0f} s for {what}; last heard from it {silent:.0f} s ago; its log: {self._log_path}"
        )


def child_environment(device: str, threads: int) -> dict[str, str]:
    """Of a child that runs vLLM: offline, quiet, and threads that sleep instead of spin when they wait."""
    environment = dict(os.environ)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": environment.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's worker runs where its engine does, unless it is split
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would hold our sockets open
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")])),
    }
    if device == "cpu":
        # Trainer and sampler take turns on the same cores: a spinning barrier would steal the other's time.
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    else:
        environment["CUDA_VISIBLE_DEVICES"] = device.rpartition(":")[2]
    return environment
