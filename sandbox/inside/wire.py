"""Runs inside jails: requests from the tests to the solution and back, over descriptor 4.

A message is a length and plain data as in plain.py, with one addition: an object that is not plain stays where it
is, and its number crosses (`{"h": 3}`).
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox.plain import MAX_DEPTH, NotPlain, _pack, _unpack

WIRE_FD = 4
MAX_MESSAGE = 4 << 20


class Gone(Exception):
    """The other end ended, or sent what is no message."""


def send_message(value: Any, dumps: Any = json.dumps, write: Any = os.write) -> None:
    data = dumps(value).encode("ascii")
    view = memoryview(len(data).to_bytes(4, "big") + data)
    try:
        while view:
            view = view[write(WIRE_FD, view) :]
    except OSError as error:
        raise Gone(str(error)) from None


def receive_message(loads: Any = json.loads, read: Any = os.read) -> Any:
    size = int.from_bytes(receive_exactly(4, read), "big")
    if size > MAX_MESSAGE:
        raise Gone("a message is too large")
    try:
        return loads(receive_exactly(size, read))
    except (ValueError, RecursionError) as error:
        raise Gone(f"a message is malformed: {error}") from None


def receive_exactly(size: int, read: Any) -> bytes:
    pieces = []
    while size:
        try:
            piece = read(WIRE_FD, min(size, 1 << 20))
        except OSError as error:
            raise Gone(str(error)) from None
        if not piece:
            raise Gone("the other end has ended")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def pack_with(value: Any, handle: Any, depth: int = 60) -> Any:
    """Plain data as it is; `handle(object)` gives the number of any other object, or raises NotPlain."""
    kind = type(value)
    if depth > 0:
        if kind is list:
            return [pack_with(item, handle, depth - 1) for item in value]
        if kind is tuple:
            return {"t": [pack_with(item, handle, depth - 1) for item in value]}
        if kind is dict:
            pairs = [[pack_with(k, handle, depth - 1), pack_with(v, handle, depth - 1)] for k, v in value.items()]
            return {"d": pairs}
    try:
        return _pack(value, MAX_DEPTH, [1_000_000])
    except NotPlain:
        return {"h": handle(value)}


def unpack_with(value: Any, handle: Any) -> Any:
    """The other way. Raises NotPlain, TypeError, ValueError or KeyError on what nobody packed."""
    if type(value) is list:
        return [unpack_with(item, handle) for item in value]
    if type(value) is dict and len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "h":
            return handle(inner)
        if tag == "t":
            return tuple([unpack_with(item, handle) for item in inner])
        if tag == "d":
            return {unpack_with(k, handle): unpack_with(v, handle) for k, v in inner}
    return _unpack(value, MAX_DEPTH)
