"""Several trainers as one: each computes its share of a step's micro-batches, all take the same optimizer step.

Every rank is given the whole step and plans it alike, so that every count and the normaliser are the step's whatever
the number of ranks. What travels are the trained tensors' gradients, summed, and what the micro-batches came to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from engine.errors import RunError

BUCKET_NUMBERS = 1 << 25
"""Gradients that travel at a time, 128 MiB of fp32."""
STEP_SECONDS = 1800.0
"""Until every rank is there, and in the middle of a step, where all of them work; one that has died is noticed at once
by its closed connection."""
_Item = TypeVar("_Item")


class Ranks:
    """This trainer's place among the others. Rank 0 drives: its trainer's calls are repeated by those that `follow`."""

    def __init__(self, rank: int = 0, world: int = 1, device: str = "cpu") -> None:
        """With others, they meet where the environment says that torchrun makes. Raises RunError where they don't
        come."""
        self.rank, self.world = rank, world
        self._orders: dist.ProcessGroup | None = None
        if world == 1:
            return
        if device != "cpu":
            torch.cuda.set_device(device)
        with self._together("meeting the other trainers"):
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=STEP_SECONDS),
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
        """On rank 0 what the `count` micro-batches came to, in their order, on the others nothing; `own` are those of
        `share`."""
        if self.world == 1:
            return list(own)
        found: list[Any] | None = [None] * self.world if self.leads else None
        with self._together("gathering what the micro-batches came to"):
            dist.gather_object(list(own), found)
        return [found[i % self.world][i // self.world] for i in range(count)] if found else []

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Rank 0 ends the others. One that fails says nothing more, for they may wait for its part of a step: they end
        by its closed connections."""
        if self.world == 1:
            return
        if kind is None:
            self.tell("end")
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


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    numbers = 0
    for parameter in parameters:
        numbers += parameter.numel()
        if bucket and numbers > BUCKET_NUMBERS:
            yield bucket
            bucket, numbers = [], parameter.numel()
        bucket.append(parameter)
    if bucket:
        yield bucket
