"""What a run may not leave behind, however it ended."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from tests.small import below

PR_SET_CHILD_SUBREAPER = 36
SECONDS = 30.0


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
        return {path.name for path in Path("/dev/shm").iterdir()}

    @staticmethod
    def _reap() -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass  # there is none
