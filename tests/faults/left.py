"""What a run may not leave behind, however it ended."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from tests.small import below

PR_SET_CHILD_SUBREAPER = 36
SECONDS = 30.0
SHARED = "/dev/shm/"


class Left:
    """Looks for processes and shared memory segments beyond those that were there when it was made.

    This process adopts what outlives a run of its own, so nothing can hide.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._segments = self._shared()
        self.said = ""

    def nothing(self) -> bool:
        """Whether all is gone, or goes within seconds; `said` has what is not."""
        deadline = time.monotonic() + SECONDS
        while True:
            self._reap()
            processes, segments = below(os.getpid()), self._shared() - self._segments
            if not processes and not segments:
                return True
            if time.monotonic() > deadline:
                self.said = f"left: {processes} {segments}"
                return False
            time.sleep(0.05)

    @staticmethod
    def _shared() -> set[str]:
        """The segments' names, without those that a living process holds which is none of ours."""
        names = {path.name for path in Path(SHARED).iterdir()}
        ours = {os.getpid(), *below(os.getpid())}
        for folder in Path("/proc").glob("[0-9]*"):
            if names and int(folder.name) not in ours:
                names -= held(folder)
        return names

    @staticmethod
    def _reap() -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass  # there is none


def held(process: Path) -> set[str]:
    """The shared memory segments that a process, a folder in /proc, has mapped or open."""
    try:
        places = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
        places += [os.readlink(link) for link in (process / "fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()  # it ended while we looked, or is another user's
    return {place.removeprefix(SHARED).split("/")[0] for place in places if place.startswith(SHARED)}
