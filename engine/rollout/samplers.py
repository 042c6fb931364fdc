"""Several samplers as one: groups placed, completions landed from any of them, and losses made good."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.rollout.deliver import Transport, deliver
from engine.rollout.messages import (
    Beat,
    Bind,
    Bound,
    Group,
    Landed,
    Ready,
    SamplerConfig,
    Score,
    Scored,
)
from engine.rollout.sampler import LANDED_SECONDS, Gone, Inbox, Sampler, SamplerError, SamplerLost
from engine.types import Completion

HANG_SECONDS = 120.0
"""Without a sign of life from a sampler that has work; one engine step takes a small part of it."""
RESTARTS = 3
"""Of one sampler, without a completion landing in between; after that the run ends."""
DELIVERIES = 3
"""Of one version, to those that it did not reach because another sampler was lost."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """What one sampler has done since the run began, restarts included."""

    device: str
    completions: int
    tokens: int
    busy_seconds: float
    """Spent in vLLM's steps."""
    unfinished: int
    restarts: int
    resampled: int
    """Completions that were lost on the way, with their sampler or alone, and asked for again."""
    memory_mb: float


@dataclass(slots=True)
class _Slot:
    """One sampler's place: its process now, and what it owes."""

    config: SamplerConfig
    log: Path
    process: Sampler
    owed: dict[int, set[int]] = field(default_factory=dict)
    """Members that are still to land, by group."""
    submits: int = 0
    asked: float = 0.0
    """When it was last given work."""
    deaths: int = 0
    """Since a completion landed."""
    restarts: int = 0
    resampled: int = 0
    completions: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    """The last two: of its earlier processes."""

    @property
    def load(self) -> int:
        return sum(len(members) for members in self.owed.values())


class Samplers:
    """One sampler for each of `configs`, each with its own log file and `threads` threads on a CPU.

    A group goes whole to the sampler that owes least. A sampler that dies or gives no sign of life for `hang_seconds`
    while it has work is started again with the weights of the last install, and what it owed is sampled again with
    the same seeds; a completion lands once, by its group and member. Every wait has a deadline. Its methods may be
    called from several threads.
    """

    def __init__(
        self,
        configs: Sequence[SamplerConfig],
        *,
        threads: int,
        logs: Sequence[Path],
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        self._threads, self._hang_seconds = threads, hang_seconds
        self._inbox: Inbox = queue.SimpleQueue()
        self._groups: dict[int, Group] = {}
        self._transport: Transport | None = None
        self._version: int | None = None
        self._lock = threading.RLock()
        # The kernel ends a sampler with the thread that started it, not with the process: so one that lasts starts all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sampler-starter")
        self._slots: list[_Slot] = []
        for config, log in zip(configs, logs, strict=True):
            self._slots.append(_Slot(config, log, self._start(config, log)))

    def wait_ready(self) -> list[Ready]:
        """Wait until every sampler has loaded its model. One that dies here is not started again."""
        return [slot.process.wait_ready() for slot in self._slots]

    def submit(self, groups: Sequence[Group]) -> None:
        """Queue groups for sampling. Placement depends on what is owed, not on the clock."""
        with self._lock:
            placed: list[list[Group]] = [[] for _ in self._slots]
            for group in groups:
                if group.group in self._groups:
                    raise ValueError(f"group {group.group} is being sampled already: every group needs its own number")
                index = min(range(len(self._slots)), key=lambda i: self._slots[i].load)
                self._groups[group.group] = group
                self._slots[index].owed[group.group] = set(group.asked)
                placed[index].append(group)
            for slot, share in zip(self._slots, placed, strict=True):
                if share:
                    self._give(slot, share)

    def landed(self, count: int, deadline_seconds: float = LANDED_SECONDS) -> Iterator[Completion]:
        """The next `count` completions of any group, each as it finishes; the deadline holds between two of them.

        Raises SamplerError where a log-prob is no number, where a sampler can't be kept alive, and at the deadline.
        """
        for number in range(1, count + 1):
            deadline = time.monotonic() + deadline_seconds
            while (completion := self._look()) is None:
                if time.monotonic() >= deadline:
                    raise SamplerLost(
                        f"waited {deadline_seconds:.0f} s for completion {number} of {count}; {self._owing()}"
                    )
            yield completion

    def poll(self) -> Completion | None:
        """The next completion of any group, if one lands within half a second; sees to samplers that died or hang.

        Raises SamplerError where a log-prob is no number and where a sampler can't be kept alive.
        """
        return self._look()

    def abort(self, groups: Sequence[int]) -> None:
        """Drop what is left of groups: none of it lands any more."""
        with self._lock:
            for slot in self._slots:
                theirs = [group for group in groups if slot.owed.pop(group, None) is not None]
                if theirs:
                    try:
                        slot.process.abort(theirs)
                    except SamplerLost as error:
                        self._restart(slot, error)
            for group in groups:
                self._groups.pop(group, None)

    def bind(self, transport: Transport) -> int:
        """Tell every sampler how the trainer's tensors reach it; how many names found their place in each.

        Raises SamplerError with the names that have none.
        """
        with self._lock:
            self._transport = transport
            return min(a.names for a in self._ask(Bind(transport.address), Bound, "binding the trainer's tensors"))

    def install(self, version: int, tensors: Any) -> dict[str, float]:
        """Have every sampler take over the trainer's tensors as `version`; the slowest one's seconds of each phase.

        They are written here, under the lock: a sampler that is replaced at any other time gets the last version whole.
        Raises SamplerError where a sampler can't be kept alive, and where the tensors don't arrive.
        """
        with self._lock:
            self._bound.write(tensors)
            self._version = version
            pending, seconds, why = list(self._slots), list[dict[str, float]](), ""
            for _ in range(DELIVERIES):
                answers = deliver(self._bound, [slot.process for slot in pending], version)
                missed = []
                for slot, answer in zip(pending, answers, strict=True):
                    if isinstance(answer, SamplerLost):
                        self._restart(slot, answer)  # which installs it
                    elif answer.missed:
                        missed.append(slot)
                        why = answer.missed
                    else:
                        seconds.append(answer.seconds)
                if not missed:
                    return {phase: max(s[phase] for s in seconds) for phase in (seconds[0] if seconds else ())}
                pending = missed
            raise SamplerError(
                f"version {version} did not reach the sampler on {pending[0].config.device}, tried {DELIVERIES} times: "
                f"{why}"
            )

    def scores(self, token_ids: tuple[int, ...]) -> list[tuple[float, ...]]:
        """Each sampler's log-probs of a text's tokens but the first, at temperature 1."""
        with self._lock:
            return [a.logprobs for a in self._ask(Score(token_ids), Scored, "the canary's log-probs")]

    def stats(self) -> list[SamplerStats]:
        """Of each sampler, as of its last heartbeat."""
        with self._lock:
            return [
                SamplerStats(
                    slot.config.device,
                    slot.completions,
                    slot.tokens + slot.process.beat.tokens,
                    slot.busy_seconds + slot.process.beat.busy_seconds,
                    slot.load,
                    slot.restarts,
                    slot.resampled,
                    slot.process.beat.memory_mb,
                )
                for slot in self._slots
            ]

    @property
    def pids(self) -> list[int]:
        """Of the processes, each the leader of its own group."""
        return [slot.process.pid for slot in self._slots]

    def close(self) -> None:
        """End every sampler and all that it started."""
        for slot in self._slots:
            slot.process.hang_up()
        for slot in self._slots:
            slot.process.close()
        self._starter.shutdown()

    def _start(self, config: SamplerConfig, log: Path) -> Sampler:
        start = self._starter.submit(Sampler, config, threads=self._threads, log=log, inbox=self._inbox)
        return start.result()

    def _give(self, slot: _Slot, groups: Sequence[Group]) -> None:
        slot.asked = time.monotonic()
        slot.submits += 1
        try:
            slot.process.submit(groups)
        except SamplerLost as error:
            self._restart(slot, error)  # which gives it all that it owes

    def _look(self) -> Completion | None:
        """The next completion if one comes soon; sees to samplers that died, hang or lost something."""
        try:
            process, message = self._inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            self._restart_hung()
            return None
        with self._lock:
            slot = next((slot for slot in self._slots if slot.process is process), None)
            if slot is None:
                return None  # the last words of a process that has been replaced
            match message:
                case Landed(completion):
                    return self._land(slot, completion)
                case Beat(submits=submits, unfinished=0) if submits == slot.submits and slot.owed:
                    # It sends in order: what it has not sent before it said that it is done was lost on the way.
                    slot.resampled += slot.load
                    self._give(slot, self._remaining(slot))
                case Gone():
                    self._restart(slot, process.lost(self._what(slot)))
        return None

    def _land(self, slot: _Slot, completion: Completion) -> Completion | None:
        members = slot.owed.get(completion.group, set())
        if completion.member not in members:
            return None  # aborted, or sampled twice
        bad = next((i for i, value in enumerate(completion.logprobs) if not math.isfinite(value)), None)
        if bad is not None:
            raise SamplerError(
                f"group {completion.group}, member {completion.member} (task {completion.task_id}): the sampler on "
                f"{slot.config.device} gave token {bad} of {len(completion.token_ids)} the log-prob "
                f"{completion.logprobs[bad]}; its weights or its KV are broken, nothing of it was trained on"
            )
        members.remove(completion.member)
        if not members:
            del slot.owed[completion.group], self._groups[completion.group]
        slot.completions += 1
        slot.deaths = 0
        return completion

    def _restart_hung(self) -> None:
        with self._lock:
            for slot in self._slots:
                silent = time.monotonic() - max(slot.process.heard, slot.asked)
                if slot.owed and silent > self._hang_seconds:
                    self._restart(slot, SamplerLost(f"no sign of life for {silent:.0f} s at {self._what(slot)}"))

    def _restart(self, slot: _Slot, reason: SamplerError) -> None:
        """Another process in the slot, with the weights of the last install and all the work that is owed."""
        while True:
            slot.deaths += 1
            slot.tokens += slot.process.beat.tokens
            slot.busy_seconds += slot.process.beat.busy_seconds
            slot.process.close(grace_seconds=0.0)
            if slot.deaths > RESTARTS:
                raise SamplerError(
                    f"the sampler on {slot.config.device} was started {slot.deaths} times and landed nothing: {reason}"
                ) from reason
            slot.restarts += 1
            slot.process = self._start(slot.config, slot.log)
            try:
                slot.process.wait_ready()
                if self._transport is not None:
                    slot.process.bind(self._transport.address)
                if self._version is not None:
                    [answer] = deliver(self._bound, [slot.process], self._version)
                    if isinstance(answer, SamplerLost):
                        raise answer
                    if answer.missed:
                        raise SamplerLost(f"version {self._version} did not reach the sampler: {answer.missed}")
                slot.submits = 0
                if slot.owed:
                    slot.resampled += slot.load
                    slot.submits, slot.asked = 1, time.monotonic()
                    slot.process.submit(self._remaining(slot))
                return
            except SamplerLost as error:
                reason = error

    @property
    def _bound(self) -> Transport:
        if self._transport is None:
            raise ValueError("nothing can be installed before `bind`")
        return self._transport

    def _remaining(self, slot: _Slot) -> list[Group]:
        return [replace(self._groups[group], members=tuple(sorted(left))) for group, left in slot.owed.items()]

    def _ask(self, message: object, kind: Any, what: str) -> list[Any]:
        """Each sampler's answer; they work on it at the same time. One that is lost is replaced and asked again."""
        lost: dict[int, SamplerLost] = {}
        for index, slot in enumerate(self._slots):
            try:
                slot.process.send(message)
            except SamplerLost as error:
                lost[index] = error
        answers = []
        for index, slot in enumerate(self._slots):
            try:
                if index in lost:
                    raise lost[index]
                answers.append(slot.process.answer(kind, what))
            except SamplerLost as error:
                self._restart(slot, error)
                slot.process.send(message)
                answers.append(slot.process.answer(kind, what))
        return answers

    def _what(self, slot: _Slot) -> str:
        return f"{slot.load} completions of group {', '.join(map(str, slot.owed))}" if slot.owed else "nothing"

    def _owing(self) -> str:
        return "; ".join(f"sampler {i} on {s.config.device} owes {self._what(s)}" for i, s in enumerate(self._slots))
