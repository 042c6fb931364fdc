"""The trainer's handle on a sampler process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

from engine.errors import RunError
from engine.rollout.messages import (
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
_Answer = TypeVar("_Answer", Ready, Bound, Installed, Scored)


class SamplerError(RunError):
    """The sampler process failed, died or did not answer in time."""


class Sampler:
    """One vLLM in a process of its own. It starts loading at once; `wait_ready` waits for it.

    `log` is where the process's own output goes. Every method that waits has a deadline and raises SamplerError,
    naming what it waited for.
    """

    def __init__(self, config: SamplerConfig, *, threads: int, log: Path) -> None:
        ours, theirs = socket.socketpair()
        self._log_path = log
        self._log: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.rollout.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=_environment(config.device, threads),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send(config)

    def wait_ready(self) -> Ready:
        """Wait until the model is loaded."""
        return self._answer(Ready, "loading its model", LOAD_SECONDS)

    def submit(self, groups: Sequence[Group]) -> None:
        """Queue groups for sampling."""
        self._send(Submit(tuple(groups)))

    def landed(self, count: int, deadline_seconds: float = ANSWER_SECONDS) -> Iterator[Completion]:
        """The next `count` completions, each as it finishes; the deadline holds between two of them."""
        for i in range(count):
            message = self._receive(f"completion {i + 1} of {count}", deadline_seconds)
            if not isinstance(message, Landed):
                raise SamplerError(f"the sampler sent {type(message).__name__} instead of a completion")
            yield message.completion

    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """The sampler's log-probs of a text's tokens but the first, at temperature 1."""
        self._send(Score(token_ids))
        return self._answer(Scored, "the canary's log-probs", ANSWER_SECONDS).logprobs

    def bind(self, address: dict[str, Any]) -> int:
        """Tell it where the factors stand; the number of pairs that found their place."""
        self._send(Bind(address))
        return self._answer(Bound, "binding the factors", ANSWER_SECONDS).modules

    def install(self, version: int) -> dict[str, float]:
        """Have it take over the factors as `version`; its seconds by phase."""
        self._send(Install(version))
        return self._answer(Installed, f"the install of version {version}", ANSWER_SECONDS).seconds

    def close(self) -> None:
        """End the process and all that it started; does nothing when it is closed already."""
        if self._connection.closed:
            return
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass  # it is in the middle of something: the signal below ends it
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has gone already
        self._process.wait()
        self._log.close()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._death(f"sending {type(message).__name__}") from error

    def _answer(self, kind: type[_Answer], what: str, seconds: float) -> _Answer:
        message = self._receive(what, seconds)
        if not isinstance(message, kind):
            raise SamplerError(f"the sampler sent {type(message).__name__} while the trainer waited for {what}")
        return message

    def _receive(self, what: str, seconds: float) -> object:
        deadline = time.monotonic() + seconds
        while not self._connection.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
            if self._process.poll() is not None and not self._connection.poll(0):
                raise self._death(what)
            if time.monotonic() >= deadline:
                raise SamplerError(f"waited {seconds:.0f} s for {what}; its log: {self._log_path}")
        try:
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(what) from error
        if isinstance(message, Failed):
            raise SamplerError(f"the sampler failed at {what}: {message.reason}; its log: {self._log_path}")
        return message

    def _death(self, what: str) -> SamplerError:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return SamplerError(f"the sampler closed its pipe at {what}; its log: {self._log_path}")
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return SamplerError(f"the sampler {how} while the trainer waited for {what}; its log: {self._log_path}")


def _environment(device: str, threads: int) -> dict[str, str]:
    """The child's environment: offline, quiet, and threads that sleep instead of spin when they wait."""
    environment = dict(os.environ)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": environment.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")])),
    }
    if device == "cpu":
        # Trainer and sampler take turns on the same cores: a spinning barrier would steal the other's time.
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    else:
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "CUDA_VISIBLE_DEVICES": device.rpartition(":")[2],
        }
    return environment
