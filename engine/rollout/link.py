"""What a sampler process is reached through: a child of this process, or one on another machine."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Protocol

from engine.imports import WAITING
from engine.rollout.group import await_end
from engine.rollout.messages import SamplerConfig

SEND_SECONDS = 60.0
"""A sampler that reads nothing for so long, with its socket full, is dead."""
BUFFER_BYTES = 1 << 18
GROUP_SECONDS = 15.0
"""For the processes below a sampler, once it has ended."""

# The kernel ends a sampler with the thread that started it, not with the process: so one that lasts starts all.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="sampler-starter")


class Link(Protocol):
    """One sampler process, as whoever drives it holds it."""

    @property
    def pid(self) -> int:
        """Of the process, which leads a process group of its own; 0 while there is none."""

    @property
    def place(self) -> str:
        """Where it runs, for a person."""

    @property
    def log(self) -> object:
        """Where its own output goes, for a person."""

    @property
    def placed(self) -> bool:
        """It has been started; one that waits for room has not."""

    @property
    def gone(self) -> bool:
        """It has ended."""

    def send(self, message: object) -> None:
        """Hand it a message. Raises OSError where it is gone or reads nothing."""

    def receive(self) -> object:
        """Its next message, waiting for it. Raises EOFError or OSError once it is gone."""

    def end(self) -> str:
        """How it ended, `was killed by signal SIGKILL`; empty where it has not."""

    def hang_up(self) -> None:
        """Have it end by itself, without waiting for that."""

    def close(self, grace_seconds: float) -> None:
        """End it and all that it started; what it does at the moment it may do for `grace_seconds`."""

    def free(self) -> None:
        """Give back what belongs to it here, once it is closed and nobody waits in `receive`."""


class Child:
    """A sampler process that is a child of this one; the two talk over a socket.

    What it says is a stream of pickles that is read through a large buffer: with hundreds of samplers a system call or
    two for each message are most of what a completion costs the driver.
    """

    placed = True

    def __init__(self, device: str, *, threads: int, log: Path) -> None:
        """log: takes the process's own output."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_SECONDS), 0))
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()), readable=False)
        self._stream = open(os.dup(ours.fileno()), "rb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._file: IO[bytes] = log.open("ab")
        self.log, self.place = log, device

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-m", "engine.rollout.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=child_environment(device, threads),
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        self._process = _STARTER.submit(start).result()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def gone(self) -> bool:
        """It has ended."""
        return self._process.poll() is not None

    def send(self, message: object) -> None:
        """Hand it a message. Raises OSError where it is gone or reads nothing."""
        self._connection.send(message)

    def receive(self) -> object:
        """Its next message. Raises EOFError or OSError once it is gone."""
        return next_of(self._stream)

    def end(self) -> str:
        """How it ended, which may take it a moment after its last word; empty where it has not."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return ""
        return f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def hang_up(self) -> None:
        """Close the socket, on which the process ends by itself once it reads."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has hung up already, or `close` has been here

    def close(self, grace_seconds: float) -> None:
        """End the process and all that it started."""
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

    def free(self) -> None:
        """Close the socket and the log."""
        self._connection.close()
        self._stream.close()
        self._socket.close()
        self._file.close()


def next_of(stream: IO[bytes]) -> object:
    """The next message of a stream of pickles. Raises EOFError where it ends, also in the middle of one."""
    try:
        return pickle.load(stream)
    except pickle.UnpicklingError as error:
        raise EOFError(str(error)) from error


def children(configs: Sequence[SamplerConfig], *, threads: int, logs: Sequence[Path]) -> Callable[[int], Child]:
    """Starts the sampler of a number as a child, on `threads` threads of a CPU, with its own log file."""
    return lambda number: Child(configs[number].device, threads=threads, log=logs[number])


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
        environment = WAITING | environment
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # All that would be compiled is a line that counts ranks, which nobody reads: 2 s and a C++ compiler.
            "TORCHDYNAMO_DISABLE": "1",
        }
    else:
        environment["CUDA_VISIBLE_DEVICES"] = device.rpartition(":")[2]
    return environment
