"""The sampler process: `python -m engine.rollout.worker FD`, driven over the socket FD by `Sampler`.

Messages come in over a `Connection` and go out as a stream of pickles, see `link`. It owns its device and its vLLM and
ends when its parent does, and vLLM's own processes end with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from engine.imports import without_collector
from engine.rollout.group import kill_group
from engine.rollout.messages import (
    Abort,
    Beat,
    Bind,
    Bound,
    Failed,
    Install,
    Installed,
    Landed,
    Ready,
    SamplerConfig,
    Score,
    Scored,
    Submit,
    VllmLost,
)

BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the parent until it closes its end of the socket."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes this process
    connection = Connection(int(sys.argv[1]))
    _end_together(connection)
    out = open(os.dup(connection.fileno()), "wb")  # noqa: SIM115

    def say(message: object) -> None:
        pickle.dump(message, out, pickle.HIGHEST_PROTOCOL)
        out.flush()

    try:
        _serve(connection, say)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone, and the interpreter's way out through vLLM takes seconds
    except Exception as error:
        traceback.print_exc()  # into the log that the trainer's error names
        say(Failed(f"{type(error).__name__}: {error}", again=isinstance(error, VllmLost)))
        sys.stderr.flush()
        os._exit(1)  # not through vLLM's way out, which may wait for a process that hangs


def _end_together(connection: Connection) -> None:
    """However this process ends, kill its group: processes that vLLM starts notice late or never that it is gone.

    A child of the same group waits for the end. It holds nothing but a handle on this process.
    """
    if os.getpgrp() != os.getpid():
        return  # the group is not ours
    handle = os.pidfd_open(os.getpid())
    if os.fork():
        os.close(handle)
        return
    connection.close()
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    waiting.poll()
    kill_group()


def _serve(connection: Connection, say: Callable[[object], None]) -> None:
    config: SamplerConfig = connection.recv()
    start = time.perf_counter()
    with without_collector():  # only this process may import vLLM
        if config.engine == "async":
            from engine.rollout.async_engine import AsyncEngine as Engine
        else:
            from engine.rollout.vllm_engine import VllmEngine as Engine  # type: ignore[assignment]

    gc.freeze()  # millions of vLLM's objects, which vLLM's own collections would look through
    engine = Engine(config)
    book = engine.book
    say(Ready(engine.version, time.perf_counter() - start))
    submits, busy_seconds, last_beat = 0, 0.0, time.monotonic()
    while True:
        while connection.poll(0 if book.unfinished else None):
            match connection.recv():
                case Submit(groups):
                    submits += 1
                    book.add(groups)
                case Abort(numbers):
                    engine.abort(numbers)
                case Score(token_ids):
                    say(Scored(engine.score(token_ids)))
                case Bind(address):
                    say(Bound(engine.bind(address)))
                case Install(version, meeting):
                    missed = engine.fetch(meeting)
                    say(Installed(version, {} if missed else engine.install(version), missed))
                case other:
                    raise TypeError(f"the sampler does not know the message {other!r}")
        start = time.perf_counter()
        landed = engine.step()
        busy_seconds += time.perf_counter() - start
        for completion in landed:
            say(Landed(completion))
        if not book.unfinished or time.monotonic() - last_beat > BEAT_SECONDS:
            last_beat = time.monotonic()
            say(Beat(submits, book.unfinished, book.tokens, busy_seconds, _resident_mb()))


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
