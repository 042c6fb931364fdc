"""Several trainers as one: each computes its share of a step's micro-batches, all take the same optimizer step.

Every rank is given the whole step and plans it alike, so that every count and the normaliser are the step's whatever
the number of ranks. What travels are the trained tensors' gradients, summed, and what the micro-batches came to.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from engine.errors import RunError

BUCKET_NUMBERS = 1 << 25
"""Gradients that travel at a time, 128 MiB of fp32."""
JOIN_SECONDS = 600.0
"""Until every rank is there: each loads the model first."""
STEP_SECONDS = 1800.0
"""In the middle of a step, where all ranks work; a rank that has died is noticed at once by its closed connection."""
_Item = TypeVar("_Item")


class Ranks:
    """This trainer's place among the others. Rank 0 drives: its trainer's calls are repeated by those that `follow`."""

    def __init__(self, rank: int = 0, world: int = 1, address: str = "", device: str = "cpu") -> None:
        """address: where rank 0 listens, as torch.distributed takes it, such as `tcp://10.0.0.1:29500`; empty reads
        the environment that torchrun makes.

        Raises RunError where the others don't come.
        """
        self.rank, self.world = rank, world
        self._orders: dist.ProcessGroup | None = None
        if world == 1:
            return
        if device != "cpu":
            torch.cuda.set_device(device)
        with self._together("meeting the other trainers"):
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=address or "env://",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=max(JOIN_SECONDS, STEP_SECONDS)),
            )
            # Between two steps the others wait for as long as sampling takes.
            self._orders = dist.new_group(backend="gloo", timeout=timedelta(days=7))

    @property
    def leads(self) -> bool:
        """It drives the others, writes and samples."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of `count` micro-batches this rank computes."""
        return range(self.rank, count, self.world)

    def tell(self, method: str, *arguments: object) -> None:
        """Have the others call the same method of their trainer. Does nothing on a rank that follows."""
        if self.world > 1 and self.leads:
            with self._together(f"handing out {method}"):
                dist.broadcast_object_list([(method, arguments)], src=0, group=self._orders)

    def follow(self, trainer: object) -> None:
        """Call what rank 0 calls until it ends."""
        while True:
            told: list[Any] = [None]
            with self._together("waiting for rank 0"):
                dist.broadcast_object_list(told, src=0, group=self._orders)
            method, arguments = told[0]
            if method == "end":
                return
            getattr(trainer, method)(*arguments)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Each gradient becomes the sum of all ranks'; one that no rank has stays None."""
        if self.world == 1:
            return
        with self._together("adding up gradients"):
            there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
            dist.all_reduce(there)
            used = [p for p, ranks in zip(parameters, there.tolist(), strict=True) if ranks]
            for bucket in _buckets(used):
                flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
                dist.all_reduce(flat)
                for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    parameter.grad = total.view_as(parameter)

    def gather(self, own: Sequence[_Item], count: int) -> list[_Item]:
        """What the `count` micro-batches came to, in their order; `own` are those of `share`."""
        if self.world == 1:
            return list(own)
        found: list[Any] = [None] * self.world
        with self._together("gathering what the micro-batches came to"):
            dist.all_gather_object(found, list(own))
        return [found[i % self.world][i // self.world] for i in range(count)]

    def require_alike(self, what: str, value: float) -> None:
        """Raises RunError where the ranks' values differ: then their weights do too, or will."""
        if self.world == 1:
            return
        found: list[Any] = [None] * self.world
        with self._together(f"comparing {what}"):
            dist.all_gather_object(found, value)
        if len({str(one) for one in found}) > 1:
            raise RunError(f"the trainers came apart: their {what} are {found}; go on with --resume")

    def largest(self, value: float) -> float:
        """Of all ranks."""
        if self.world == 1:
            return value
        found: list[Any] = [None] * self.world
        with self._together("comparing memory"):
            dist.all_gather_object(found, value)
        return float(max(found))

    def close(self) -> None:
        """Rank 0 ends the others; does nothing where there are none, or where they are gone."""
        if self.world > 1 and dist.is_initialized():
            try:
                self.tell("end")
            except RunError:
                pass  # what ended them has been said, or it ends this process now
            dist.destroy_process_group()

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistError is one
            said = str(error).splitlines()[0]
            raise RunError(
                f"trainer {self.rank} of {self.world} lost the others while {what}: {said}; go on with --resume"
            ) from error


ALONE = Ranks()
"""The only trainer."""


def free_address(host: str = "127.0.0.1") -> str:
    """Where ranks on this host may meet, as torch.distributed takes it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
