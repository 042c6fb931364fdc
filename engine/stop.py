"""SIGINT and SIGTERM while a run trains: the first asks for an end after the step, SIGINT once more ends it now."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

STOP_LINE = b"\nrlvr: stopping: this step is finished and saved first; Ctrl-C once more ends the run now\n"


class Stopped(Exception):
    """The run was asked to stop and is at a place where it can."""


class Stop:
    """Heeds the signals for as long as it is entered, in the main thread."""

    def __init__(self) -> None:
        self._asked = False
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # a shell starts its background jobs so
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Stopped if the run was asked to stop."""
        if self._asked:
            raise Stopped

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What can be given up in the middle: the first signal raises Stopped in it."""
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # a machine's owner may say SIGTERM more than once
        self._asked = True
        os.write(2, STOP_LINE)  # the handler may have come in the middle of a print
        if self._at_once:
            raise Stopped
