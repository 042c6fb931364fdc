"""Runs in a solution's process: executes the program, then does what the tests' process asks over the wire."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox.inside.names import execute, solution_namespace
    from sandbox.inside.program import PRIVATE, finish
    from sandbox.inside.wire import Gone, pack_with, receive_message, send_message, unpack_with

    program = compile("", "", "exec")

objects: list[Any] = []
MAX_ITEMS = 200_000


def main() -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    space = solution_namespace(program)
    code = execute(program, space)
    if code == 0:
        try:
            send_message(["ready"])
            while True:
                send_message(answer(space, receive_message()))
        except Gone:  # the tests are over
            pass
    finish(space, code, PRIVATE)


def answer(space: dict[str, Any], request: Any) -> Any:
    """A value and what became of the arguments, or what was raised."""
    try:
        operation, target, args, named = request
        owner = objects[target] if type(target) is int else None
        given = [unpack_with(item, objects.__getitem__) for item in args]
        keywords = {key: unpack_with(value, objects.__getitem__) for key, value in named.items()}
        value = perform(space, operation, owner, given, keywords)
        return [
            "value",
            pack(value),
            [pack(item) if type(item) in (list, dict, set) else None for item in given],
        ]
    except BaseException as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        try:
            text = str(error)
        except BaseException:  # the program's own __str__
            text = ""
        return ["raise", names, text[:2000]]


def perform(space: dict[str, Any], operation: str, owner: Any, given: list[Any], named: Any) -> Any:
    if operation == "name":
        if given[0] not in space:
            raise AttributeError(f"the program does not define {given[0]!r}")
        return space[given[0]]
    if operation == "call":
        return owner(*given, **named)
    if operation == "get":
        return getattr(owner, given[0])
    if operation == "set":
        return setattr(owner, given[0], given[1])
    if operation == "list":
        items = []
        for item in owner:
            items.append(item)
            if len(items) > MAX_ITEMS:
                raise OverflowError("the iterator does not end")
        return items
    if operation == "isinstance":
        return isinstance(given[0], owner)
    if operation == "mro":
        return [kind.__name__ for kind in owner.__mro__] if isinstance(owner, type) else []
    if operation == "special":
        return getattr(type(owner), given[0])(owner, *given[1:])
    raise ValueError(f"unknown operation {operation!r}")


def pack(value: Any) -> Any:
    return pack_with(value, keep)


def keep(value: Any) -> int:
    objects.append(value)
    return len(objects) - 1
