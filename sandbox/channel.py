"""Frames over a seqpacket socket, in an event loop: read as they come, sent at once."""

from __future__ import annotations

import asyncio
import collections
import socket
import struct

from sandbox.inside.runner import MAX_FRAME

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Unreachable(Exception):
    """The other end is gone."""


class Channel:
    """The host's end of a control socket. `peer` is the pid that sent the first frame, if the socket passes
    credentials: the kernel fills it in, as seen from the host."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self.control = control
        self.ended = False
        self.peer = 0
        self._frames: collections.deque[bytes] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None
        asyncio.get_running_loop().add_reader(control, self._readable)

    def _readable(self) -> None:
        """Take every frame that has come; an empty one, kept for good, is the end."""
        while not self.ended:
            try:
                frame, ancillary, _, _ = self.control.recvmsg(MAX_FRAME, 64)
            except BlockingIOError:
                break
            except OSError:  # reset: the other end closed with something of ours unread
                frame, ancillary = b"", []
            if self.peer == 0:
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                        self.peer = _CREDENTIALS.unpack(data)[0]
            if frame:
                self._frames.append(frame)
            else:
                self.end()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def frame(self, seconds: float) -> bytes | None:
        """The next frame; empty when the other end is gone, None when nothing came for `seconds`."""
        if not self._frames and not self.ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._frames:
            return self._frames.popleft()
        return b"" if self.ended else None

    def send(self, frame: bytes, descriptors: list[int] | None = None) -> None:
        """Raises Unreachable."""
        try:
            if descriptors:
                socket.send_fds(self.control, [frame], descriptors)
            else:
                self.control.send(frame)
        except OSError as error:
            raise Unreachable(error.strerror) from error

    def end(self) -> None:
        """Read no more."""
        if not self.ended:
            self.ended = True
            asyncio.get_running_loop().remove_reader(self.control)

    def close(self) -> None:
        """The other end sees the end of file."""
        self.end()
        self.control.close()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
