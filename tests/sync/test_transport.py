from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from engine.sync.transport import Attached, SharedTensors, Tensors

CPU = torch.device("cpu")
SHAPES = {
    "a.q_proj": (torch.Size((2, 5)), torch.Size((3, 2))),
    "b.norm.weight": (torch.Size((7,)),),
}
READER = """
import pickle, sys, torch
from engine.sync.transport import Attached
sent = Attached(pickle.load(sys.stdin.buffer), torch.device("cpu"))
print(sent.scale, {name: [t.sum().item() for t in group] for name, group in sent.tensors.items()})
"""


def tensors(value: float) -> dict[str, tuple[torch.Tensor, ...]]:
    return {
        name: tuple(torch.full(shape, value + i) for i, shape in enumerate(group)) for name, group in SHAPES.items()
    }


@pytest.fixture
def shared() -> Iterator[SharedTensors]:
    memory = SharedTensors(SHAPES, scale=0.5)
    yield memory
    memory.close()


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


def test_a_reader_sees_what_the_trainer_wrote_and_what_it_writes_later(shared: SharedTensors) -> None:
    sent = Attached(shared.address, CPU)
    assert sent.scale == 0.5
    for value in (1.5, -3.0):
        shared.write(tensors(value))
        assert same(sent.tensors, tensors(value))


def test_a_reader_in_another_process(shared: SharedTensors) -> None:
    shared.write(tensors(1.0))
    done = subprocess.run([sys.executable, "-c", READER], input=pickle.dumps(shared.address), capture_output=True)
    assert done.stdout.decode() == "0.5 {'a.q_proj': [10.0, 12.0], 'b.norm.weight': [7.0]}\n", done.stderr


def test_a_device_of_its_own_sees_new_tensors_at_each_fetch(shared: SharedTensors) -> None:
    sent = Attached(shared.address, torch.device("meta"))  # a device that shares no memory, as a GPU
    assert all(t.device.type == "meta" for group in sent.tensors.values() for t in group)
    sent.fetch()


def test_bf16_weights_arrive_rounded() -> None:
    memory = SharedTensors({"w": (torch.Size((3,)),)}, dtype="bfloat16")
    memory.write({"w": (torch.tensor([1.0, 1.001, 3.0]),)})
    [got] = Attached(memory.address, CPU).tensors["w"]
    assert got.tolist() == [1.0, 1.0, 3.0]
    memory.close()


def test_names_and_shapes_must_be_the_announced_ones(shared: SharedTensors) -> None:
    renamed = tensors(1.0)
    renamed["a.q_porj"] = renamed.pop("a.q_proj")
    with pytest.raises(KeyError, match="q_porj"):
        shared.write(renamed)
    with pytest.raises(ValueError, match=r"a\.q_proj has shapes \[\(3, 5\)"):
        shared.write({**tensors(1.0), "a.q_proj": (torch.zeros(3, 5), torch.zeros(3, 2))})
    with pytest.raises(ValueError, match="c has 3 tensors"):
        SharedTensors({"c": (torch.Size((1,)),) * 3})


def test_nothing_is_left_in_dev_shm_and_no_descriptor_after_close() -> None:
    files, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    memory = SharedTensors(SHAPES, scale=1.0)
    assert set(os.listdir("/dev/shm")) == files
    memory.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
