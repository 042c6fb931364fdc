"""Removes a pool's cgroups when the process that owns the pool was killed and cannot."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

# Waits for the end of file on descriptor 3, which comes when the pool's process ends, however it ends.
_SCRIPT = """
read -r _ <&3
tries=0
while [ $tries -lt 100 ]; do
  tries=$((tries + 1))
  left=
  for group in "$@"; do
    [ -d "$group" ] || continue
    while read -r pid; do kill -9 "$pid"; done <"$group/cgroup.procs"
    rmdir "$group" || left=1
  done
  [ -z "$left" ] && exit 0
  sleep 0.1
done
"""


@dataclass(frozen=True, slots=True)
class Janitor:
    """A small shell that outlives its pool by as long as it takes to clean up."""

    pid: int
    pipe: int

    async def stop(self) -> None:
        """End it: the pool has cleaned up itself."""
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)
        await asyncio.get_running_loop().run_in_executor(None, _reap, self.pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:  # reaped by someone else in this process
        return


def start(folders: list[Path]) -> Janitor:
    """Watch over these cgroup folders. Raises OSError."""
    read, write = os.pipe()
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _SCRIPT, "rlvr-janitor", *map(str, folders)],
            {"PATH": "/usr/bin:/bin"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, read, 3),
            ],
            setpgroup=0,
            setsigmask=(),
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD),
        )
    finally:
        os.close(read)
    return Janitor(pid, write)
