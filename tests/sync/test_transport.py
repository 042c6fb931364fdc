from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from engine.sync.transport import SharedFactors, attach

SHAPES = {
    "a.q_proj": (torch.Size((2, 5)), torch.Size((3, 2))),
    "b.down_proj": (torch.Size((2, 7)), torch.Size((4, 2))),
}
READER = """
import pickle, sys
from engine.sync.transport import attach
views, scale = attach(pickle.load(sys.stdin.buffer))
print(scale, {name: (a.sum().item(), b.sum().item()) for name, (a, b) in views.items()})
"""


def factors(value: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {n: (torch.full(a, value), torch.full(b, 2 * value)) for n, (a, b) in SHAPES.items()}


@pytest.fixture
def shared() -> Iterator[SharedFactors]:
    memory = SharedFactors(SHAPES, scale=0.5)
    yield memory
    memory.close()


def test_a_reader_sees_what_the_trainer_wrote_and_what_it_writes_later(shared: SharedFactors) -> None:
    views, scale = attach(shared.address)
    assert scale == 0.5
    for value in (1.5, -3.0):
        shared.write(factors(value))
        for name, (a, b) in factors(value).items():
            assert torch.equal(views[name][0], a)
            assert torch.equal(views[name][1], b)


def test_a_reader_in_another_process(shared: SharedFactors) -> None:
    shared.write(factors(1.0))
    done = subprocess.run([sys.executable, "-c", READER], input=pickle.dumps(shared.address), capture_output=True)
    assert done.stdout.decode() == "0.5 {'a.q_proj': (10.0, 12.0), 'b.down_proj': (14.0, 16.0)}\n", done.stderr


def test_names_and_shapes_must_be_the_announced_ones(shared: SharedFactors) -> None:
    renamed = factors(1.0)
    renamed["a.q_porj"] = renamed.pop("a.q_proj")
    with pytest.raises(KeyError, match="q_porj"):
        shared.write(renamed)
    with pytest.raises(RuntimeError):
        shared.write({**factors(1.0), "a.q_proj": (torch.zeros(3, 5), torch.zeros(3, 2))})


def test_nothing_is_left_in_dev_shm_and_no_descriptor_after_close() -> None:
    files, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    memory = SharedFactors(SHAPES, scale=1.0)
    assert set(os.listdir("/dev/shm")) == files
    memory.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
