"""The sampler process: `python -m engine.rollout.worker FD`, driven over the socket FD by `Sampler`.

It owns its device and its vLLM and ends when its parent does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

from engine.rollout.messages import (
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
)

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the parent until it closes its end of the socket."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes this process
    connection = Connection(int(sys.argv[1]))
    try:
        _serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone, and the interpreter's way out through vLLM takes seconds
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        raise SystemExit(1) from error


def _serve(connection: Connection) -> None:
    config: SamplerConfig = connection.recv()
    start = time.perf_counter()
    from engine.rollout.vllm_engine import VllmEngine  # heavy, and only this process may import vLLM

    engine = VllmEngine(config)
    connection.send(Ready(engine.version, time.perf_counter() - start))
    while True:
        while connection.poll(0 if engine.busy else None):
            match connection.recv():
                case Submit(groups):
                    engine.submit(groups)
                case Score(token_ids):
                    connection.send(Scored(engine.score(token_ids)))
                case Bind(address):
                    connection.send(Bound(engine.bind(address)))
                case Install(version):
                    connection.send(Installed(version, engine.install(version)))
                case other:
                    raise TypeError(f"the sampler does not know the message {other!r}")
        for completion in engine.step():
            connection.send(Landed(completion))


if __name__ == "__main__":
    main()
