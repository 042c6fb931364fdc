"""An nsjail with a warm interpreter in it, as the host sees it: it is asked for jails and makes them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import time

from sandbox import cgroup
from sandbox.channel import Channel, Unreachable
from sandbox.jail import CODE_FD, CONTROL_FD, FILTER_FD
from sandbox.process import Jail, MachineFault

START_SECONDS = 60.0
GRACE_SECONDS = 2.0
_CREDENTIALS = struct.Struct("3i")


class Zygote:
    """One nsjail. `used` counts the jails that it made, `living` those that are not yet closed."""

    def __init__(self, pid: int, pidfd: int, control: socket.socket, log: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.channel = Channel(control)
        self.log = log
        self.started = time.monotonic()
        self.used = 0
        self.living = 0
        self.status = 0
        self.exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._reap)

    @property
    def alive(self) -> bool:
        """Whether it can be asked for another jail."""
        return not self.channel.ended and not self.exited.is_set()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        try:
            _, self.status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # reaped by someone else in this process; its status is lost
            self.status = 0
        os.close(self.pidfd)
        self.exited.set()

    async def ready(self) -> None:
        """Wait until it has started. Raises MachineFault."""
        frame = await self.channel.frame(START_SECONDS)
        if frame != b"Z":
            raise MachineFault(f"nsjail did not start: {self._said() or 'no reason given'}")

    async def jail(self, tmp_mb: int, group: cgroup.Group | None) -> Jail:
        """A fresh jail, in `group`. Raises MachineFault."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.used += 1
        self.living += 1
        jail = Jail(self, ours, group)
        try:
            with theirs:
                options = f"size={tmp_mb << 20},nr_inodes=1024,mode=1777"
                try:
                    self.channel.send(b"N" + options.encode(), [theirs.fileno()])
                except Unreachable as error:
                    raise MachineFault(f"nsjail has ended: {error}") from error
            await jail.hello()
        except MachineFault as fault:
            await jail.close()
            raise MachineFault(f"{fault} {self._said()}".strip()) from fault
        except BaseException:  # cancelled
            await jail.close()
            raise
        return jail

    def _said(self) -> str:
        size = os.fstat(self.log).st_size
        return os.pread(self.log, 600, max(0, size - 600)).decode("utf-8", "replace").strip()

    async def close(self) -> None:
        """End it and wait until nothing of it runs: end of file, then SIGTERM, then SIGKILL."""
        self.channel.close()
        for step in (signal.SIGTERM, signal.SIGKILL, None):
            try:
                await asyncio.wait_for(self.exited.wait(), GRACE_SECONDS)
                break
            except TimeoutError:
                if step is not None:
                    signal.pidfd_send_signal(self.pidfd, step)
        os.close(self.log)


def sealed_file(data: bytes) -> int:
    """A memory file that nobody can change any more."""
    descriptor = os.memfd_create("code", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def spawn(command: list[str], code: int, seccomp_filter: int) -> Zygote:
    """Start nsjail with `command`; the others are sealed files. Raises MachineFault.

    posix_spawn, because the caller may be a process of many GiB with many threads, which must not be forked.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = os.memfd_create("log", os.MFD_CLOEXEC)
    # High numbers, so that no dup2 below overwrites the source of a later one.
    sources = (theirs.fileno(), code, seccomp_filter, log)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in sources]
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
    ]
    actions += [(os.POSIX_SPAWN_DUP2, fd, to) for fd, to in zip(high, (CONTROL_FD, CODE_FD, FILTER_FD, 2), strict=True)]
    try:
        pid = os.posix_spawn(
            command[0],
            command,
            {},
            file_actions=actions,
            setpgroup=0,
            setsigmask=(),
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP),
        )
    except OSError as error:
        ours.close()
        os.close(log)
        if isinstance(error, FileNotFoundError):
            raise MachineFault(
                f"nsjail is gone: {command[0]} was there when the run began; install it again"
            ) from error
        raise MachineFault(f"nsjail does not start: {error}") from error
    finally:
        theirs.close()
        for fd in high:
            os.close(fd)
    return Zygote(pid, os.pidfd_open(pid), ours, log)
