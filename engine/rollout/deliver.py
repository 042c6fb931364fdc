"""New weights to several samplers at the same time, whatever way they travel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from engine.errors import TransferError
from engine.rollout.messages import Install, Installed
from engine.rollout.sampler import Sampler, SamplerLost


class Transport(Protocol):
    """What `engine.sync` opens at the trainer: its tensors as they were last written."""

    @property
    def address(self) -> dict[str, Any]:
        """What a sampler needs to find or receive them."""

    def write(self, tensors: Any) -> None:
        """Take over the trainer's tensors, which are sent from now on."""

    def meet(self, members: Mapping[int, int]) -> list[dict[str, Any] | None]:
        """What each member must be told for the next `send`; `members` has their numbers of workers."""

    def send(self, version: int, gone: Callable[[], Collection[int]]) -> None:
        """Hand the tensors to all of them, which are receiving at this time. Raises TransferError."""


def deliver(transport: Transport, samplers: Sequence[Sampler], version: int) -> list[Installed | SamplerLost]:
    """Have each sampler take over what was written to `transport` as `version`; its answer, or why it is lost.

    All are told first, then the trainer sends, then the answers are awaited. An answer may say that nothing arrived,
    since another member was lost: the sampler is as before and can be asked again.
    """
    lost: dict[int, SamplerLost] = {}
    meetings = transport.meet({sampler.number: sampler.workers for sampler in samplers})
    for sampler, meeting in zip(samplers, meetings, strict=True):
        try:
            sampler.send(Install(version, meeting))
        except SamplerLost as error:
            lost[sampler.number] = error
    try:
        transport.send(version, lambda: {s.number for s in samplers if s.number in lost or s.gone})
    except TransferError as error:
        for number in error.absent:
            lost.setdefault(number, SamplerLost(str(error)))
    answers: list[Installed | SamplerLost] = []
    for sampler in samplers:
        try:
            if sampler.number in lost:
                raise lost[sampler.number]
            answers.append(sampler.answer(Installed, f"the install of version {version}"))
        except SamplerLost as error:
            answers.append(error)
    return answers
