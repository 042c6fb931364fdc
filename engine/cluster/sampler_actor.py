"""What runs on a sampler's node: an ordinary sampler process, and an actor between it and the driver."""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from engine.cluster.tensors import CLUSTER
from engine.rollout import Child
from engine.rollout.messages import Bind, Failed, Install, SamplerConfig
from engine.snapshot import SnapshotError, resolve
from engine.sync import SharedTensors

WAIT_SECONDS = 10.0
"""That a call of `receive` waits for a message."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The first word: the sampler process is started, there."""

    node: str
    """The node's id."""
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last word: the sampler process has ended."""

    how: str


class SamplerActor:
    """Starts a sampler process and stands between it and the driver. Its methods run on threads, several at a time.

    The trainer's tensors come through Ray's object store, once to each node, and are laid into memory that the process
    shares with this one: so the process itself is the one of a single machine.
    """

    def __init__(self, source: str, sha256: str, threads: int) -> None:
        """source, sha256: the model, which is resolved here and may be fetched."""
        self._source, self._sha256 = source, sha256
        self._threads = threads
        self._child: Child | None = None
        self._shared: SharedTensors | None = None
        self._early: dict[int, tuple[object, Any]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._said: queue.SimpleQueue[object] = queue.SimpleQueue()
        # A file without a name, gone with this process however that ends: what is written there goes to the driver.
        self._log = Path(f"/proc/self/fd/{os.memfd_create('rlvr-sampler-log')}")
        self._log_read = 0

    def send(self, number: int, message: object, tensors: Any = None) -> None:
        """Hand the process a message. Ray may bring calls out of their order: `number` counts them from 0."""
        with self._lock:
            self._early[number] = (message, tensors)
            while self._next in self._early:
                self._hand(*self._early.pop(self._next))
                self._next += 1

    def receive(self) -> tuple[list[object], bytes]:
        """What the process said since the last call, and what its log got since; waits for it a while."""
        said = []
        try:
            said.append(self._said.get(timeout=WAIT_SECONDS))
            while True:
                said.append(self._said.get_nowait())
        except queue.Empty:
            pass
        with self._log.open("rb") as log:
            log.seek(self._log_read)
            written = log.read()
        self._log_read += len(written)
        return said, written

    def close(self, grace_seconds: float) -> None:
        """End the process and all that it started."""
        with self._lock:
            if self._child is not None:
                self._child.close(grace_seconds)

    def _hand(self, message: object, tensors: Any) -> None:
        match message:
            case SamplerConfig():
                self._start(message)
                return
            case Bind(address) if address["transport"] == CLUSTER:
                self._shared = SharedTensors(address["shapes"], address["scale"], address["dtype"])
                message = Bind(self._shared.address)
            case Install(version) if tensors is not None:
                assert self._shared is not None, "bound before anything is installed"
                np.copyto(self._shared.bytes, tensors)
                message = Install(version)
        assert self._child is not None, "the first message is the sampler's configuration"
        try:
            self._child.send(message)
        except OSError:
            pass  # it has ended, which the reader says with its last words

    def _start(self, config: SamplerConfig) -> None:
        try:
            folder = resolve(self._source, self._sha256).folder
        except SnapshotError as error:
            self._said.put(Failed(str(error), again=True))  # another node may have it
            self._said.put(Ended("never started"))
            return
        device = config.device if config.device == "cpu" else f"cuda:{os.environ['CUDA_VISIBLE_DEVICES']}"
        self._child = child = Child(device, threads=self._threads, log=self._log)
        self._said.put(Placed(ray.get_runtime_context().get_node_id(), child.pid))
        child.send(replace(config, device=device, model_dir=str(folder)))
        threading.Thread(target=self._read, args=(child,), name="sampler-reader", daemon=True).start()

    def _read(self, child: Child) -> None:
        try:
            while True:
                self._said.put(child.receive())
        except (EOFError, OSError):
            self._said.put(Ended(child.end() or "closed its pipe"))
