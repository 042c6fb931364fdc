"""The two ways in which a command fails on purpose; every other exception is a bug and keeps its traceback."""

from __future__ import annotations

from collections.abc import Collection


class InputError(Exception):
    """What was asked for can't be done: the text names the thing, the value and what to do. Exit code 2."""


class RunError(Exception):
    """A run that had started can't go on; the text says why. Exit code 1."""


class TransferError(RunError):
    """The trainer's tensors did not reach every sampler; the text says what state each side was in.

    `absent` are the members that are to blame, by the numbers that they were called by; nobody where that is unknown.
    """

    def __init__(self, text: str, absent: Collection[int] = ()) -> None:
        super().__init__(text)
        self.absent = frozenset(absent)
