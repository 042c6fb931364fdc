"""The end of a process group in which Python processes share memory by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

TRACKER = b"multiprocessing.resource_tracker"
TRACKER_SECONDS = 10.0
"""For Python's resource trackers to unlink what the others had shared by name, once those are gone."""


def living(group: int) -> dict[int, bytes]:
    """The processes of a group that have not ended: their numbers and command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, leader, *_ = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if int(leader) == group and state != b"Z":
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found


def kill_group() -> None:
    """Kill this process's group, itself last. A resource tracker that is killed leaves named memory behind for good,
    so trackers are given time to end by themselves: they do when all are gone whose memory they know."""
    group, own = os.getpgrp(), os.getpid()
    deadline = time.monotonic() + TRACKER_SECONDS
    while (others := {pid: line for pid, line in living(group).items() if pid != own}) and time.monotonic() < deadline:
        for pid, line in others.items():
            if TRACKER not in line:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it ended while we looked
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)


def await_end(group: int, seconds: float) -> bool:
    """Whether nothing of the group lives any more, or ends in time."""
    deadline = time.monotonic() + seconds
    while living(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
