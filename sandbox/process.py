"""One jail as the host sees it: give it a program, run cases in it, make sure that it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from sandbox import cgroup, watch
from sandbox.channel import Channel, Unreachable
from sandbox.inside import runner
from sandbox.types import Limits

TICK_SECONDS = 0.25
HELLO_SECONDS = 60.0
COMPILE_CPU_SECONDS = 10.0
LOST_SECONDS = 180.0
GRACE_SECONDS = 1.0
EXTRA_ADDRESS_MB = 1200  # without a memory cgroup: room for libraries and for thread stacks of 512 MiB


class MachineFault(Exception):
    """A jail failed in a way that says nothing about the program in it.

    `suspect` is true when the jail's first process died while its supervisor lived, which a program might
    conceivably have caused.
    """

    def __init__(self, reason: str, *, suspect: bool = False) -> None:
        super().__init__(reason)
        self.suspect = suspect


class Supervisor(Protocol):
    """Who made the jail."""

    living: int
    exited: asyncio.Event


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case did, as the kernel told the runner. CPU and wall in seconds, memory in MiB."""

    status: int
    reason: int  # why it was killed: one of runner's reasons
    oom: bool
    cpu: float
    wall: float
    memory_mb: float
    output: bytes
    overflow: bool
    errors: str


class Jail:
    """A jail for one program. Not for two tasks at once. `lost` means that no other case can be run in it."""

    def __init__(self, supervisor: Supervisor, control: socket.socket, group: cgroup.Group | None) -> None:
        self.supervisor = supervisor
        self.channel = Channel(control)
        self.group = group
        self.pid = 0  # of its first process, as the host sees it
        self.pidfd = -1
        self.started = time.monotonic()
        self.exited = asyncio.Event()
        self.seq = 0
        self.limits = Limits()
        self.spent = 0.0  # CPU seconds of the cases so far
        self.lost = False

    async def hello(self) -> None:
        """Wait until the runner is ready and put it into its group. Raises MachineFault."""
        frame = await self._frame(HELLO_SECONDS)
        if frame != b"H":
            raise MachineFault("a jail did not start")
        self.pid = self.channel.peer
        try:
            self.pidfd = os.pidfd_open(self.pid)
            asyncio.get_running_loop().add_reader(self.pidfd, self._gone)
            if self.group is not None:
                # In a thread: the kernel may take milliseconds over it, and the loop serves other jails.
                await asyncio.get_running_loop().run_in_executor(None, cgroup.admit, self.group, self.pid)
        except OSError as error:
            raise MachineFault(f"a jail could not be put into its cgroup: {error}") from error

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        self.exited.set()

    def load(self, source: bytes, hints: str, harness: int | None, limits: Limits) -> None:
        """Send a program; `compiled` says what became of it. Raises MachineFault."""
        if self.group is not None:
            cgroup.set_limit(self.group, limits.memory_mb)
        self.limits = limits
        file = memory_file(source)
        try:
            self._send(runner.PROGRAM.pack(b"P") + hints.encode(), [file] if harness is None else [file, harness])
        finally:
            os.close(file)

    async def compiled(self) -> str:
        """What is wrong with the program, or an empty string. Raises MachineFault."""
        start = time.monotonic()
        while True:
            frame = await self._frame(COMPILE_CPU_SECONDS)
            if frame:
                _, good = runner.COMPILED.unpack_from(frame)
                reason = frame[runner.COMPILED.size :].decode("utf-8", "replace")
                return "" if good else reason or "it does not compile"
            if frame is not None:
                self.lost = True
                if self.group is not None and cgroup.oomed(self.group):
                    return "compiling it took too much memory"
                raise await self._death("a jail died while compiling")
            if watch.cpu_of(self.pid) >= COMPILE_CPU_SECONDS * 0.8:
                self.lost = True
                return "compiling it took too long"
            if time.monotonic() - start > LOST_SECONDS:
                self.lost = True
                raise MachineFault("a jail did not compile a program in time")

    def submit(self, files: list[int]) -> int:
        """Send a case: memory files for its input and output, and what else it gets, from descriptor 3 on.

        Returns its number, for `result`. Raises MachineFault.

        It starts when those before it are done. Its files are out of the reach of the case that runs now: the
        runner keeps them, and each case's process closes all that is not its own before the program starts.
        """
        self.seq += 1
        limits = self.limits
        size = max(limits.output_bytes + 1, limits.tmp_mb << 20)
        space = limits.memory_mb + EXTRA_ADDRESS_MB if self.group is None else 0
        frame = runner.RUN.pack(b"R", self.seq, limits.cpu_seconds, TICK_SECONDS, limits.processes, size, space)
        self._send(frame, files)
        return self.seq

    async def result(self, seq: int, output: int) -> Outcome:
        """What case `seq` did. Raises MachineFault."""
        start = time.monotonic()
        observer: watch.Observer | None = None
        while True:
            frame = await self._frame(LOST_SECONDS)
            if frame is None:
                self.lost = True
                raise MachineFault(f"a jail's runner was silent for {LOST_SECONDS:.0f} s")
            if not frame:
                return await self._died(start)
            kind = frame[:1]
            if kind == b"T" and len(frame) == runner.TICK.size:
                _, told, wall, used = runner.TICK.unpack(frame)
                observer = observer or watch.Observer(self.pid, self.spent, self.limits)
                reason = observer.judge(wall, used) if told == seq else runner.ALIVE
                if told == seq and self.group is not None and cgroup.oomed(self.group):
                    reason = runner.MEMORY  # judged already; what is left of it may sleep for long
                if reason != runner.ALIVE:
                    self._send(runner.KILL.pack(b"K", seq, reason), [])
            elif kind == b"D" and len(frame) >= runner.DONE.size:
                return self._outcome(frame, seq, output)
            else:
                self.lost = True
                raise MachineFault("a jail's runner sent something unknown", suspect=True)

    def _outcome(self, frame: bytes, asked: int, output: int) -> Outcome:
        limits = self.limits
        _, seq, status, reason, dirty, _, tree, wall, peak = runner.DONE.unpack_from(frame)
        if seq != asked:
            self.lost = True
            raise MachineFault("a jail's runner answered for another case", suspect=True)
        if reason == runner.STARVED:
            self.lost = True
            raise MachineFault(f"a case got {tree:.2f} s of CPU in {wall:.0f} s: the machine is too busy")
        self.spent += tree
        size = os.fstat(output).st_size
        oom = self.group is not None and cgroup.oomed(self.group)
        self.lost = self.lost or dirty or oom
        return Outcome(
            status=status,
            reason=reason,
            oom=oom,
            cpu=tree,
            wall=wall,
            memory_mb=peak / 1024,
            output=os.pread(output, min(size, limits.output_bytes), 0),
            overflow=size > limits.output_bytes,
            errors=frame[runner.DONE.size :].decode("utf-8", "replace"),
        )

    async def _died(self, start: float) -> Outcome:
        """The runner is gone: for want of memory, which is the program's doing, or else a fault."""
        self.lost = True
        if self.group is not None and cgroup.oomed(self.group):
            wall = time.monotonic() - start
            return Outcome(9, runner.ALIVE, True, 0.0, wall, float(self.limits.memory_mb), b"", False, "")
        raise await self._death("a jail's first process died")

    async def _death(self, what: str) -> MachineFault:
        """What to raise for a runner that died: its supervisor may have died first, which comes to be known a
        little later."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.supervisor.exited.wait(), GRACE_SECONDS)
            return MachineFault("nsjail was killed, or ended")
        return MachineFault(what, suspect=True)

    def _send(self, frame: bytes, descriptors: list[int]) -> None:
        try:
            self.channel.send(frame, descriptors)
        except Unreachable as error:
            self.lost = True
            raise MachineFault(f"a jail cannot be reached: {error}") from error

    async def _frame(self, seconds: float) -> bytes | None:
        return await self.channel.frame(seconds)

    async def close(self) -> None:
        """End the jail and wait until nothing of it runs: end of file, or SIGKILL, which a pid 1 passes to all."""
        self.channel.close()
        if self.pidfd >= 0:
            if self.lost:
                self._kill()
            try:
                await asyncio.wait_for(self.exited.wait(), GRACE_SECONDS)
            except TimeoutError:
                self._kill()
                await self.exited.wait()
            os.close(self.pidfd)
            self.pidfd = -1
        self.supervisor.living -= 1

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


def memory_file(data: bytes) -> int:
    """An anonymous file that holds `data`, at its start; its descriptor."""
    descriptor = os.memfd_create("in", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
