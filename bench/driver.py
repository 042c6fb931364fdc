"""What a completion and a version cost the driver, by its number of samplers: `python bench/driver.py --json OUT`.

The samplers are fake: another process answers for all of them at once, each over a socket of its own, in the real
messages, with completions of TOKENS tokens. The driver's side is the run's own: links, reader threads, `Samplers`,
`Pipeline`. Its CPU seconds are counted, wall seconds stand beside. `saturates` is what one driver could take if it did
nothing else: completions by its CPU second.
"""

from __future__ import annotations

import argparse
import os
import pickle
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, wait
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.report import Answer, least, print_rows, publish, ratio, rows_of, target  # noqa: E402
from engine.pipeline import Pipeline  # noqa: E402
from engine.rollout import Samplers  # noqa: E402
from engine.rollout.link import BUFFER_BYTES, next_of  # noqa: E402
from engine.rollout.messages import (  # noqa: E402
    Beat,
    Bind,
    Bound,
    Group,
    Install,
    Installed,
    Landed,
    Ready,
    SamplerConfig,
    Sampling,
    Score,
    Scored,
    Submit,
)  # fmt: skip
from engine.sync import SharedTensors  # noqa: E402
from engine.types import Completion, Graded  # noqa: E402
from sandbox import Verdict  # noqa: E402

SIZES = (8, 64, 512)
GROUPS, MEMBERS, TOKENS, VERSIONS = 2048, 8, 256, 20
FLAT, ENOUGH = 1.2, 5000.0
UNITS = {"completion_us": "us CPU", "saturates": "/s", "wall": "/s", "version_us": "us CPU", "threads": ""}
LAYER = "model.layers.0.mlp.down_proj"


class FakeLink:
    """A link to one of the other process's samplers."""

    pid, place, placed, log = 1, "nowhere", True, ""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._connection = Connection(os.dup(self._socket.fileno()), readable=False)
        self._stream: IO[bytes] = open(os.dup(self._socket.fileno()), "rb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self.gone = False
        self.send = self._connection.send

    def receive(self) -> object:
        """As a real one."""
        return next_of(self._stream)

    def end(self) -> str:
        """Nothing."""
        return ""

    def hang_up(self) -> None:
        """Close the socket."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, grace_seconds: float) -> None:
        """Nothing: the other process ends by itself."""

    def free(self) -> None:
        """Close what is open."""
        self._connection.close()
        self._stream.close()
        self._socket.close()


def serve(address: str, count: int) -> None:
    """Answer for `count` samplers until the last one hangs up."""
    ids, logprobs = tuple(range(TOKENS)), tuple(-0.001 * i for i in range(TOKENS))
    chosen = selectors.DefaultSelector()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(count)
        print("listening", flush=True)
        for _ in range(count):
            connection = Connection(listener.accept()[0].detach())
            out = open(os.dup(connection.fileno()), "wb")  # noqa: SIM115
            chosen.register(connection, selectors.EVENT_READ, ([0], out))
    while chosen.get_map():
        for key, _ in chosen.select():
            connection, (submits, out) = key.fileobj, key.data  # type: ignore[assignment]

            def say(message: object, out: IO[bytes] = out) -> None:
                pickle.dump(message, out, pickle.HIGHEST_PROTOCOL)
                out.flush()

            try:
                message = connection.recv()
            except EOFError:
                chosen.unregister(connection)
                continue
            match message:
                case SamplerConfig():
                    say(Ready("fake", 0.0))
                case Bind():
                    say(Bound(1))
                case Install(version):
                    say(Installed(version, {"write": 0.0}))
                case Score(token_ids):
                    say(Scored((-1.0,) * (len(token_ids) - 1)))
                case Submit(groups):
                    submits[0] += 1
                    for g in groups:
                        for m in g.asked:
                            say(Landed(Completion(g.task_id, g.group, m, g.prompt_ids, ids, logprobs, "stop", 0, "x")))
                    say(Beat(submits[0], 0, 0, 0.0, 0.0))


def measure(count: int) -> Answer:
    """CPU microseconds of this process a completion and a version, with `count` samplers."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "samplers")
        server = subprocess.Popen([sys.executable, __file__, "--serve", address, str(count)], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        config = SamplerConfig("", "float32", "cpu", 512, 16, 16, 0.5, 0)
        memory = SharedTensors({LAYER: (torch.Size((4, 8)), torch.Size((8, 4)))})
        with closing(memory), closing(Samplers([config] * count, lambda number: FakeLink(address))) as samplers:
            samplers.wait_ready()
            samplers.bind(memory)
            with closing(Pipeline(samplers, graded)) as pipeline:
                run(pipeline, count, 0)  # warm
                cpu, start = time.process_time(), time.perf_counter()
                run(pipeline, GROUPS, count)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - start
            tensors = {LAYER: (torch.zeros(4, 8), torch.zeros(8, 4))}
            begun = time.process_time()
            for version in range(VERSIONS):
                samplers.install(version, tensors)
                samplers.prove((1, 2, 3), lambda number, heard: 0.0)
            version_cpu = time.process_time() - begun
        server.wait()
    done = GROUPS * MEMBERS
    return {
        "completion_us": cpu / done * 1e6,
        "saturates": done / cpu,
        "wall": done / wall,
        "version_us": version_cpu / VERSIONS / count * 1e6,
        "threads": count + 2,
    }


def run(pipeline: Pipeline, groups: int, first: int) -> None:
    """So many groups from their submission to their end."""
    prompt, seeds, sampling = tuple(range(200)), tuple(range(MEMBERS)), Sampling(TOKENS)
    wait(pipeline.submit([Group(first + n, f"task-{n}", prompt, seeds, sampling) for n in range(groups)]))


def graded(completion: Completion) -> Future[Graded]:
    """A grader that has judged already: its own cost is bench/sandbox.py's."""
    future: Future[Graded] = Future()
    future.set_result(Graded(completion, None, Verdict("WA", 0, 1), 0.0))
    return future


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve[0], int(arguments.serve[1]))
        return
    found: dict[int, list[Answer]] = {count: [] for count in SIZES}
    for _ in range(arguments.rounds):  # interleaved
        for count in SIZES:
            found[count].append(measure(count))
    rows: list[Any] = []
    for count, answers in found.items():
        rows += rows_of(f"{count} samplers", "ours", UNITS, answers)
    print_rows(rows)

    def cost(count: int, metric: str) -> float | None:
        return least(rows, f"{count} samplers", "ours", metric)

    targets = [
        *target(
            "a completion at 512 samplers over one at 64",
            ratio(cost(512, "completion_us"), cost(64, "completion_us")),
            FLAT,
            "lower",
        ),
        *target(
            "a version at 512 samplers over one at 64, by sampler",
            ratio(cost(512, "version_us"), cost(64, "version_us")),
            FLAT,
            "lower",
        ),
        *target("completions a second at 512 samplers", max(a["saturates"] for a in found[512]), ENOUGH, "higher"),
    ]
    notes = [f"{MEMBERS} completions of {TOKENS} tokens a group; {GROUPS} groups in flight at once"]
    publish("bench/driver.py", rows, targets, notes, arguments.json)


if __name__ == "__main__":
    main()
