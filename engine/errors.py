"""The two ways in which a command fails on purpose; every other exception is a bug and keeps its traceback."""

from __future__ import annotations


class InputError(Exception):
    """What was asked for can't be done: the text names the thing, the value and what to do. Exit code 2."""


class RunError(Exception):
    """A run that had started can't go on; the text says why. Exit code 1."""
