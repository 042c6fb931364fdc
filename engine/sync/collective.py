"""The trainer's tensors by broadcast: gloo between processes, NCCL between GPUs, one code for both.

Trainer and readers meet at a store that the trainer serves on a free port of this host. A broadcast begins once every
member has said there that it is ready, so that a member which is late, lost or bound to other tensors is an error that
says so instead of a collective that waits. Every wait has a deadline.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from engine.errors import TransferError
from engine.sync.transport import DTYPES, Dtype, Shapes, Tensors, copy_in, lay_out, views_of

Backend = Literal["gloo", "nccl"]
HOST = "127.0.0.1"
DEADLINE_SECONDS = 120.0
"""Until the slowest sampler has finished the engine step that it is in, and for the broadcast after that."""
GO = "go"


class CollectiveTensors:
    """The trainer's side: the buffer, the store, and a process group with the readers of the last `meet`."""

    def __init__(
        self,
        shapes: Shapes,
        scale: float = 1.0,
        dtype: Dtype = "float32",
        *,
        backend: Backend = "gloo",
        device: torch.device | str = "cpu",
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """`device`: the trainer's; NCCL sends from it, gloo from the CPU. The others as of `SharedTensors`."""
        self._places, numbers = lay_out(shapes)
        self._flat = torch.zeros(numbers, dtype=DTYPES[dtype], device=device if backend == "nccl" else "cpu")
        self._views = views_of(self._flat, self._places)
        self._scale, self._dtype, self._backend, self._seconds = scale, dtype, backend, deadline_seconds
        # The kernel chooses a port that is free and the store takes over the very socket, so nobody can come between.
        listener = socket.create_server((HOST, 0))
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            HOST,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_seconds),
            master_listen_fd=listener.detach(),
        )
        self._members: dict[int, range] = {}
        """Ranks of each member's workers."""
        self._meeting, self._round = 0, 0
        self._group: Any = None

    @property
    def address(self) -> dict[str, Any]:
        """What a reader needs to know of the tensors; plain data."""
        return {
            "transport": self._backend,
            "port": self.port,
            "places": self._places,
            "numbers": self._flat.numel(),
            "scale": self._scale,
            "dtype": self._dtype,
            "seconds": self._seconds,
        }

    def write(self, tensors: Tensors) -> None:
        """Copy the tensors in. Raises KeyError or ValueError where names or shapes are not the ones agreed on."""
        copy_in(self._views, tensors)

    def meet(self, members: Mapping[int, int]) -> list[dict[str, Any] | None]:
        """What each member must be told to `fetch` the next `send`; `members` has their numbers of workers.

        The process group stays while the members do and all got the last send, else there is a new one.
        """
        starts = [1 + sum(list(members.values())[:i]) for i in range(len(members))]
        ranks = {m: range(at, at + members[m]) for m, at in zip(members, starts, strict=True)}
        stays = self._group is not None and ranks == self._members and not self._without("got")
        self._forget()
        if not stays:
            self._leave()
            self._meeting += 1
            self._members = ranks
        self._round += 1
        size = 1 + sum(members.values())
        return [
            {"meeting": self._meeting, "round": self._round, "rank": own.start, "size": size} for own in ranks.values()
        ]

    def send(self, version: int, gone: Callable[[], Collection[int]] = tuple) -> None:
        """Hand what was written to every member of the last `meet`, all of which must be fetching it.

        `gone` says which members are known to be dead. Raises TransferError where one of them is, where a member did
        not come before the deadline or came with another number of bytes, and where the broadcast failed; the other
        members' `fetch` then fails too.
        """
        deadline = time.monotonic() + self._seconds
        try:
            self._gather(version, gone, deadline)
            self._open_store.set(f"{self._round}/go", GO)
            with _told(lambda why: self._report(version, why)):
                if self._group is None:
                    size = 1 + sum(map(len, self._members.values()))
                    self._group = _join(self._backend, self._open_store, self._meeting, 0, size, self._seconds)
                _broadcast(self._group, self._flat, deadline + self._seconds)
        except TransferError as error:
            self._open_store.set(f"{self._round}/go", str(error))  # so that whoever waits need not wait longer
            self._leave()
            raise TransferError(str(error), error.absent or self._members.keys() & set(gone())) from error

    def close(self) -> None:
        """Leave the group and end the store; does nothing the second time."""
        self._leave()
        self._store = None

    @property
    def _open_store(self) -> TCPStore:
        if self._store is None:
            raise ValueError("the transport is closed")
        return self._store

    def _gather(self, version: int, gone: Callable[[], Collection[int]], deadline: float) -> None:
        """Wait until every member is there."""
        pause = 1e-4
        while missing := self._without("here"):
            dead = set(gone()) & missing
            if dead:
                raise TransferError(self._report(version, f"{len(dead)} members ended"), dead)
            if time.monotonic() > deadline:
                raise TransferError(
                    self._report(
                        version, f"{len(missing)} of {len(self._members)} did not come in {self._seconds:g} s"
                    ),
                    missing,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        odd = {member for member, ranks in self._members.items() if any(self._said(r)[1] != self._bytes for r in ranks)}
        if odd:
            raise TransferError(self._report(version, f"{len(odd)} expect other tensors"), odd)

    @property
    def _bytes(self) -> int:
        return self._flat.numel() * self._flat.itemsize

    def _without(self, what: str) -> set[int]:
        """Members of which a worker has not said `what` in this round."""
        return {
            member
            for member, ranks in self._members.items()
            if not self._open_store.check([f"{self._round}/{what}/{rank}" for rank in ranks])
        }

    def _said(self, rank: int) -> tuple[int, int]:
        """A worker's process and the bytes that it expects, as it said when it came."""
        pid, size = self._open_store.get(f"{self._round}/here/{rank}").decode().split()
        return int(pid), int(size)

    def _report(self, version: int, why: str) -> str:
        """`why`, and what each side was at."""
        states = []
        for member, ranks in self._members.items():
            for rank in ranks:
                name = f"member {member}" + (f", worker {rank - ranks.start}" if len(ranks) > 1 else "")
                if not self._open_store.check([f"{self._round}/here/{rank}"]):
                    states.append(f"{name} never came")
                    continue
                pid, size = self._said(rank)
                got = "got them" if self._open_store.check([f"{self._round}/got/{rank}"]) else "has not got them"
                states.append(f"{name} (process {pid}) expects {size:,} bytes and {got}")
        joined = "in" if self._group is not None else "not in"
        return (
            f"the {self._backend} transfer of version {version} failed: {why}. The trainer (process {os.getpid()}, "
            f"port {self.port}) has {self._bytes:,} bytes to send and is {joined} the group; {'; '.join(states)}"
        )

    def _forget(self) -> None:
        """Delete what the store holds of this round."""
        ranks = [rank for own in self._members.values() for rank in own]
        for key in ("go", *(f"{what}/{rank}" for what in ("here", "got") for rank in ranks)):
            self._open_store.delete_key(f"{self._round}/{key}")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


class Received:
    """The reader's side: what the trainer sent last, on the reader's device."""

    def __init__(self, address: Mapping[str, Any], device: torch.device) -> None:
        """Makes room; nothing is sent yet. NCCL receives on the device, gloo on the CPU."""
        self._backend: Backend = address["transport"]
        self._port, self._seconds = address["port"], address["seconds"]
        here = device if self._backend == "nccl" else torch.device("cpu")
        self._flat = torch.zeros(address["numbers"], dtype=DTYPES[address["dtype"]], device=here)
        self._copy = None if device.type == here.type else torch.empty_like(self._flat, device=device)
        self.scale: float = address["scale"]
        self.tensors: Tensors = views_of(self._flat if self._copy is None else self._copy, address["places"])
        self._store: TCPStore | None = None
        self._group: Any = None
        self._meeting = -1

    def fetch(self, meeting: Mapping[str, Any] | None = None, worker: int = 0) -> None:
        """Receive what the trainer sends in `meeting`, at the same time; `worker`: which of the member's this one is.

        Raises TransferError where nothing came before the deadline. The tensors may then hold a part of what was sent:
        nothing may be taken from them until a later `fetch`.
        """
        if meeting is None:
            raise ValueError(f"{self._backend} needs a meeting: install through a transport's `meet` and `send`")
        rank, size = meeting["rank"] + worker, self._flat.numel() * self._flat.itemsize
        state = "could not reach the trainer's store"

        def report(why: str) -> str:
            self._leave()
            return f"process {os.getpid()}, rank {rank} of {meeting['size']}, {size:,} bytes, {state}: {why}"

        with _told(report):
            if meeting["meeting"] != self._meeting:
                self._leave()
            if self._store is None:
                limit = timedelta(seconds=self._seconds)
                self._store = TCPStore(HOST, self._port, is_master=False, wait_for_workers=False, timeout=limit)
            key = f"{meeting['round']}"
            self._store.set(f"{key}/here/{rank}", f"{os.getpid()} {size}")
            state = "waited for the trainer and the other members"
            # The trainer gives up first, and says so here.
            self._store.wait([f"{key}/go"], timedelta(seconds=2 * self._seconds))
            said = self._store.get(f"{key}/go").decode()
            if said != GO:
                raise TransferError(report(said))
            if self._group is None:
                state = "was joining the group"
                self._group = _join(
                    self._backend, self._store, meeting["meeting"], rank, meeting["size"], self._seconds
                )
                self._meeting = meeting["meeting"]
            state = "was in the broadcast"
            _broadcast(self._group, self._flat, time.monotonic() + self._seconds)
            if self._copy is not None:
                self._copy.copy_(self._flat)
            self._store.set(f"{key}/got/{rank}", "")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._store, self._meeting = None, None, -1


def _join(backend: Backend, store: TCPStore, meeting: int, rank: int, size: int, seconds: float) -> Any:
    """The process group of a meeting: the same classes as vLLM's stateless groups, without its import."""
    named = PrefixStore(f"meeting-{meeting}", store)
    if backend == "nccl":
        nccl = distributed_c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=10 * seconds)  # its watchdog ends the process: ours must come first
        return nccl(named, rank, size, options)
    gloo: Any = distributed_c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=seconds)
    return gloo(named, rank, size, options)


def _broadcast(group: Any, flat: torch.Tensor, deadline: float) -> None:
    """From rank 0 to all; looks at it instead of waiting in it, since NCCL's own wait has no end on a CPU's side."""
    work = group.broadcast([flat], distributed_c10d.BroadcastOptions())
    pause = 1e-4
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError("the broadcast did not end before the deadline")
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
    work.wait()


@contextmanager
def _told(report: Callable[[str], str]) -> Iterator[None]:
    """Turn what torch raises in here into a TransferError that says what this side was at."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:  # gloo raises no narrower one, torch.distributed's own are such too
        raise TransferError(report(str(error).splitlines()[0])) from error
