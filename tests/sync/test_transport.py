"""Shared memory and a broadcast against one contract; NCCL runs the broadcast's code on GPUs."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import TransferError
from engine.sync.collective import CollectiveTensors, Received
from engine.sync.transport import Attached, Dtype, SharedTensors, Tensors
from engine.sync.ways import Way, attach, open_transport

CPU = torch.device("cpu")
SHAPES = {
    "a.q_proj": (torch.Size((2, 5)), torch.Size((3, 2))),
    "b.norm.weight": (torch.Size((7,)),),
}
SHORT = 1.0
"""A deadline, in seconds, that is to be missed."""
READER = """
import os, pickle, sys, torch
from engine.sync import collective
from engine.sync.ways import attach
address, meetings, end_at, how = pickle.load(sys.stdin.buffer)
sent = attach(address, torch.device("cpu"))
whole = collective._broadcast
for number, meeting in enumerate(meetings):
    if number == end_at:
        collective._broadcast = lambda *_: os.kill(os.getpid(), how)
    sent.fetch(meeting)
    print(sent.scale, {n: [t.flatten()[0].item() for t in group] for n, group in sent.tensors.items()}, flush=True)
"""
Sender = SharedTensors | CollectiveTensors
Reader = Attached | Received
Open = Callable[..., Sender]


def tensors(value: float) -> dict[str, tuple[torch.Tensor, ...]]:
    return {
        name: tuple(torch.full(shape, value + i) for i, shape in enumerate(group)) for name, group in SHAPES.items()
    }


@pytest.fixture(params=["shared_memory", "gloo"])
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def sender(way: Way) -> Iterator[Sender]:
    with closing(open_transport(way, SHAPES, 0.5, "float32", CPU)) as opened:
        yield opened


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


def transfer(sender: Sender, readers: Sequence[Reader], version: int = 1) -> None:
    """One send, which every reader fetches in a thread of its own."""
    meetings = sender.meet({id(reader): 1 for reader in readers})
    with ThreadPoolExecutor(len(readers)) as pool:
        fetched = [pool.submit(reader.fetch, meeting) for reader, meeting in zip(readers, meetings, strict=True)]
        sender.send(version)
        for future in fetched:
            future.result()


def start_reader(sender: Sender, meetings: Sequence[Any], *, end_at: int = -1, how: int = 0) -> subprocess.Popen[bytes]:
    """A process that fetches one meeting after another, and in the middle of number `end_at` gets the signal `how`."""
    started = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert started.stdin is not None
    pickle.dump((sender.address, list(meetings), end_at, how), started.stdin)
    started.stdin.close()
    started.stdin = None  # `communicate` would look at it
    return started


def test_readers_see_what_was_sent_last_each_time(sender: Sender) -> None:
    readers = [attach(sender.address, CPU) for _ in range(2)]
    assert [reader.scale for reader in readers] == [0.5, 0.5]
    for version, value in enumerate((1.5, -3.0, 7.0)):
        sender.write(tensors(value))
        transfer(sender, readers, version)
        assert all(same(reader.tensors, tensors(value)) for reader in readers)


def test_a_member_that_is_replaced_one_that_is_new_and_one_alone(sender: Sender) -> None:
    first, second, third = (attach(sender.address, CPU) for _ in range(3))
    for value, readers in enumerate([(first, second), (first, third), (third,), (first, second, third)]):
        sender.write(tensors(value))
        transfer(sender, readers)
        assert all(same(reader.tensors, tensors(value)) for reader in readers)


def test_a_member_of_two_workers(sender: Sender) -> None:
    readers = [attach(sender.address, CPU) for _ in range(3)]
    sender.write(tensors(2.0))
    one, two = sender.meet({10: 1, 20: 2})
    with ThreadPoolExecutor(3) as pool:
        fetched = [pool.submit(r.fetch, *where) for r, where in zip(readers, [(one,), (two, 0), (two, 1)], strict=True)]
        sender.send(1)
        for future in fetched:
            future.result()
    assert all(same(reader.tensors, tensors(2.0)) for reader in readers)


def test_a_reader_in_another_process(sender: Sender) -> None:
    sender.write(tensors(1.0))
    reader = start_reader(sender, sender.meet({7: 1}))
    sender.send(1)
    said, _ = reader.communicate(timeout=120)
    assert said.decode() == "0.5 {'a.q_proj': [1.0, 2.0], 'b.norm.weight': [1.0]}\n"


def test_a_device_of_its_own_sees_new_tensors_at_each_fetch(sender: Sender) -> None:
    reader = attach(sender.address, torch.device("meta"))  # a device that shares no memory, as a GPU
    assert all(t.device.type == "meta" for group in reader.tensors.values() for t in group)
    transfer(sender, [reader])


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_bf16_weights_arrive_rounded(way: Way, dtype: Dtype) -> None:
    with closing(open_transport(way, {"w": (torch.Size((3,)),)}, 1.0, dtype, CPU)) as sender:
        sender.write({"w": (torch.tensor([1.0, 1.001, 3.0]),)})
        reader = attach(sender.address, CPU)
        transfer(sender, [reader])
        [got] = reader.tensors["w"]
        assert got.tolist() == [1.0, 1.0, 3.0]


def test_names_and_shapes_must_be_the_announced_ones(way: Way, sender: Sender) -> None:
    renamed = tensors(1.0)
    renamed["a.q_porj"] = renamed.pop("a.q_proj")
    with pytest.raises(KeyError, match="q_porj"):
        sender.write(renamed)
    with pytest.raises(ValueError, match=r"a\.q_proj has shapes \[\(3, 5\)"):
        sender.write({**tensors(1.0), "a.q_proj": (torch.zeros(3, 5), torch.zeros(3, 2))})
    with pytest.raises(ValueError, match="c has 3 tensors"):
        open_transport(way, {"c": (torch.Size((1,)),) * 3}, 1.0, "float32", CPU)


def test_nothing_is_left_after_close(way: Way) -> None:
    def opened_and_closed() -> None:
        sender = open_transport(way, SHAPES, 1.0, "float32", CPU)
        transfer(sender, [attach(sender.address, CPU)])
        named = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
        assert all(line.endswith("(deleted)") for line in named)
        sender.close()
        sender.close()

    opened_and_closed()  # what the first one opens for good is no leak
    time.sleep(0.2)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        opened_and_closed()
    until = time.monotonic() + 5
    while (left := len(os.listdir("/proc/self/fd"))) > descriptors and time.monotonic() < until:
        time.sleep(0.05)  # gloo closes its sockets in a thread of its own
    assert left <= descriptors


def collective(seconds: float = SHORT, shapes: dict[str, tuple[torch.Size, ...]] = SHAPES) -> CollectiveTensors:
    return CollectiveTensors(shapes, deadline_seconds=seconds)


def test_every_transport_has_a_port_of_its_own() -> None:
    """Two runs on one machine: a port that another one has is never chosen."""
    with closing(collective(60.0)) as one, closing(collective(60.0)) as two:
        assert one.port != two.port
        for value, sender in enumerate((one, two)):
            sender.write(tensors(value))
            reader = attach(sender.address, CPU)
            transfer(sender, [reader])
            assert same(reader.tensors, tensors(value))


def test_a_member_that_never_comes_is_named_and_the_other_is_sent_home() -> None:
    with closing(collective()) as sender:
        reader = attach(sender.address, CPU)
        here, _ = sender.meet({11: 1, 12: 1})
        with ThreadPoolExecutor(1) as pool:
            fetched = pool.submit(reader.fetch, here)
            start = time.monotonic()
            with pytest.raises(TransferError) as raised:
                sender.send(5)
            assert time.monotonic() - start > SHORT
            with pytest.raises(TransferError, match="waited for the trainer and the other members: the gloo transfer"):
                fetched.result(timeout=60)
        assert raised.value.absent == {12}
        for part in (
            "of version 5 failed: 1 of 2 did not come in 1 s",
            f"(process {os.getpid()}, port {sender.port}) has 92 bytes to send and is not in the group",
            f"member 11 (process {os.getpid()}) expects 92 bytes and has not got them",
            "member 12 never came",
        ):
            assert part in str(raised.value)
        transfer(sender, [reader])  # and the transport goes on


def test_a_member_that_is_known_to_be_dead_is_not_waited_for() -> None:
    with closing(collective(60.0)) as sender:
        sender.meet({11: 1})
        start = time.monotonic()
        with pytest.raises(TransferError, match="1 members ended") as raised:
            sender.send(5, lambda: [11])
        assert time.monotonic() - start < 60
        assert raised.value.absent == {11}


def test_a_member_that_expects_other_bytes_is_refused() -> None:
    with closing(collective()) as sender:
        odd = attach({**sender.address, "numbers": 24}, CPU)
        [meeting] = sender.meet({11: 1})
        with ThreadPoolExecutor(1) as pool:
            fetched = pool.submit(odd.fetch, meeting)
            with pytest.raises(TransferError, match=r"1 expect other tensors.* 92 bytes to send.*expects 96 bytes"):
                sender.send(5)
            with pytest.raises(TransferError):
                fetched.result(timeout=60)


def test_a_reader_is_not_kept_by_a_trainer_that_never_sends() -> None:
    with closing(collective(0.3)) as sender:
        reader = attach(sender.address, CPU)
        [meeting] = sender.meet({11: 1})
        with pytest.raises(TransferError, match=r"rank 1 of 2, 92 bytes, waited for the trainer"):
            reader.fetch(meeting)
    with pytest.raises(TransferError, match="could not reach the trainer's store"):
        reader.fetch(meeting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "why"),
    [(signal.SIGKILL, "onnection"), (signal.SIGSTOP, "did not end before the deadline|imed out")],
    ids=["dies", "hangs"],
)
def test_a_member_that_ends_in_the_middle_of_a_broadcast(how: signal.Signals, why: str) -> None:
    """More than a socket holds, so that the trainer can't be done before the reader has begun."""
    shapes = {"w": (torch.Size((16 << 20,)),)}
    with closing(collective(3.0, shapes)) as sender:
        sender.write({"w": (torch.ones(16 << 20),)})
        # The meetings of a group that stays differ by their rounds alone.
        [first] = sender.meet({21: 1})
        assert first is not None
        reader = start_reader(sender, [first, {**first, "round": first["round"] + 1}], end_at=1, how=how)
        try:
            until = time.monotonic() + 120
            while sender._without("here") and time.monotonic() < until:  # the process starts, which takes its time
                time.sleep(0.05)
            sender.send(1)
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"1.0 {'w': [1.0]}\n"
            assert sender.meet({21: 1}) == [{**first, "round": first["round"] + 1}]
            start = time.monotonic()
            with pytest.raises(TransferError, match=rf"of version 2 failed: .*({why}).*is in the group; ") as raised:
                sender.send(2)
            assert "expects 67,108,864 bytes and has not got them" in str(raised.value)
            assert time.monotonic() - start < 60
        finally:
            reader.kill()
            reader.communicate()
        other = attach(sender.address, CPU)
        done = threading.Thread(target=transfer, args=(sender, [other]))
        done.start()
        done.join(30)
        assert not done.is_alive()
        assert other.tensors["w"][0][-1] == 1.0
