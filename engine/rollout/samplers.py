"""Several samplers as one: groups placed, completions landed from any of them, and losses made good."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from engine.rollout.deliver import Transport, deliver
from engine.rollout.link import Link
from engine.rollout.messages import (
    Beat,
    Bind,
    Bound,
    Group,
    Landed,
    SamplerConfig,
    Score,
    Scored,
)
from engine.rollout.sampler import LANDED_SECONDS, LOAD_SECONDS, Gone, Inbox, Sampler, SamplerError, SamplerLost
from engine.rollout.slot import SamplerStats, Slot
from engine.types import Completion

HANG_SECONDS = 120.0
"""Without a sign of life from a sampler that has work; one engine step takes a small part of it."""
RESTARTS = 3
"""Of one sampler, without a completion landing in between; after that the run ends."""
DELIVERIES = 3
"""Of one version, to those that it did not reach because another sampler was lost."""
LOOK_SECONDS, LATE_SECONDS = 0.5, 5.0

Check = Callable[[int, tuple[float, ...]], float]
"""Of a sampler's number and its log-probs of the canary: how far they are off. Raises where that is too far."""


class Samplers:
    """One sampler for each of `configs`, its process reached through what `link` makes for its number.

    A group goes whole to the sampler that owes least. A sampler that dies or gives no sign of life for `hang_seconds`
    while it has work is started again, and the others sample what it owed with the same seeds; once it has the weights
    of the last install, and the canary has proved that, it takes its part again. A completion lands once, by its group
    and member. Every wait has a deadline. `say` takes lines for a person. Its methods may be called from several
    threads.
    """

    def __init__(
        self,
        configs: Sequence[SamplerConfig],
        link: Callable[[int], Link],
        *,
        hang_seconds: float = HANG_SECONDS,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._link, self._hang_seconds, self._say = link, hang_seconds, say
        self._inbox: Inbox = queue.SimpleQueue()
        self._groups: dict[int, Group] = {}
        self._unplaced: dict[int, set[int]] = {}
        """What is owed while no sampler is up."""
        self._transport: Transport | None = None
        self._version: int | None = None
        self._proof: tuple[tuple[int, ...], Check] | None = None
        """The canary of the last install, for samplers that come to it later."""
        self._looked = time.monotonic()
        self._lock = threading.RLock()
        self._slots: list[Slot] = []
        for number, config in enumerate(configs):
            self._slots.append(Slot(number, config, Sampler(config, link(number), self._inbox)))
        self._by_process = {slot.process: slot for slot in self._slots}
        self._starting = list(self._slots)

    def wait_ready(self) -> None:
        """Wait until every sampler is up. At the start one that dies is not started again."""
        with self._lock:
            for slot in list(self._starting):
                slot.process.wait_ready()
                self._admit(slot)

    def submit(self, groups: Sequence[Group]) -> None:
        """Queue groups for sampling. Placement depends on what is owed, not on the clock."""
        with self._lock:
            self._admit_ready()
            for group in groups:
                if group.group in self._groups:
                    raise ValueError(f"group {group.group} is being sampled already: every group needs its own number")
                self._groups[group.group] = group
            self._place({group.group: set(group.asked) for group in groups})

    def landed(self, count: int, deadline_seconds: float = LANDED_SECONDS) -> Iterator[Completion]:
        """The next `count` completions of any group, each as it finishes; the deadline holds between two of them.

        Raises SamplerError where a log-prob is no number, where a sampler can't be kept alive, and at the deadline.
        """
        for number in range(1, count + 1):
            deadline = time.monotonic() + deadline_seconds
            while (completion := self.poll()) is None:
                if time.monotonic() >= deadline:
                    owing = "; ".join(f"{slot.title} owes {slot.owing}" for slot in self._slots)
                    raise SamplerLost(f"waited {deadline_seconds:.0f} s for completion {number} of {count}; {owing}")
            yield completion

    def poll(self) -> Completion | None:
        """The next completion of any group, if one lands within half a second; sees to samplers that died or hang.

        Raises SamplerError where a log-prob is no number and where a sampler can't be kept alive.
        """
        with self._lock:
            self._admit_ready()
            self._lose_hung()
        try:
            process, message = self._inbox.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            return None
        with self._lock:
            slot = self._by_process.get(process)
            if slot is None:
                return None  # the last words of a process that has been replaced
            match message:
                case Landed(completion):
                    return self._land(slot, completion)
                case Beat(submits=submits, unfinished=0) if submits == slot.submits and slot.owed:
                    # It sends in order: what it has not sent before it said that it is done was lost on the way.
                    slot.resampled += slot.load
                    self._give(slot, list(slot.owed))
                case Gone() if slot.up:
                    self._lose(slot, process.lost(slot.owing))
        return None

    def abort(self, groups: Sequence[int]) -> None:
        """Drop what is left of groups: none of it lands any more."""
        with self._lock:
            for group in groups:
                self._groups.pop(group, None)
                self._unplaced.pop(group, None)
            for slot in self._slots:
                theirs = [group for group in groups if group in slot.owed]
                if theirs:
                    slot.load -= sum(len(slot.owed.pop(group)) for group in theirs)
                    try:
                        slot.process.abort(theirs)
                    except SamplerLost as error:
                        self._lose(slot, error)

    def bind(self, transport: Transport) -> int:
        """Tell every sampler how the trainer's tensors reach it; how many names found their place in each.

        Raises SamplerError with the names that have none.
        """
        with self._lock:
            self._transport, self._version, self._proof = transport, None, None
            asked = self._ask(Bind(transport.address), Bound, "binding the trainer's tensors")
            return min(bound.names for bound in asked.values())

    def install(self, version: int, tensors: Any) -> dict[str, float]:
        """Have every sampler take over the trainer's tensors as `version`; the slowest one's seconds of each phase.

        They are written here, under the lock: a sampler that comes up later gets the last version whole.
        Raises SamplerError where a sampler can't be kept alive, and where the tensors don't arrive.
        """
        with self._lock:
            self._admit_ready()
            self._bound.write(tensors)
            self._version, self._proof = version, None
            pending, seconds, why = self._up(), list[dict[str, float]](), ""
            for _ in range(DELIVERIES):
                processes = [slot.process for slot in pending]
                missed = []
                for slot, process, answer in zip(
                    pending, processes, deliver(self._bound, processes, version), strict=True
                ):
                    if isinstance(answer, SamplerLost):
                        self._lose(slot, answer, process)
                    elif answer.missed:
                        missed.append(slot)
                        why = answer.missed
                    else:
                        seconds.append(answer.seconds)
                if not missed:
                    return {phase: max(s[phase] for s in seconds) for phase in (seconds[0] if seconds else ())}
                pending = missed
            raise SamplerError(f"version {version} did not reach {pending[0].title}, tried {DELIVERIES} times: {why}")

    def prove(self, token_ids: tuple[int, ...], check: Check) -> float:
        """Have `check` look at each sampler's log-probs of a text after an install; the largest that it gives.

        So is every sampler that comes up before the next install. Waits until one is up. Raises what `check` raises.
        """
        with self._lock:
            self._proof = token_ids, check
            return max(check(number, heard) for number, heard in self.scores(token_ids).items())

    def scores(self, token_ids: tuple[int, ...]) -> dict[int, tuple[float, ...]]:
        """By number, each sampler's log-probs of a text's tokens but the first, at temperature 1."""
        with self._lock:
            asked = self._ask(Score(token_ids), Scored, "the canary's log-probs")
            return {number: scored.logprobs for number, scored in asked.items()}

    def stats(self) -> list[SamplerStats]:
        """Of each sampler, as of its last heartbeat."""
        with self._lock:
            return [slot.stats() for slot in self._slots]

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

    def _up(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.up]

    def _place(self, owed: Mapping[int, Set[int]]) -> None:
        """Give members of groups to samplers that are up, whole groups to whoever owes least."""
        up = self._up()
        given: dict[int, list[int]] = {}
        for group, members in owed.items():
            if not up:
                self._unplaced[group] = set(members)
                continue
            slot = min(up, key=lambda slot: slot.load)
            slot.owed[group] = set(members)
            slot.load += len(members)
            given.setdefault(slot.number, []).append(group)
        for number, groups in given.items():
            self._give(self._slots[number], groups)

    def _give(self, slot: Slot, groups: Sequence[int]) -> None:
        asked = [replace(self._groups[g], members=tuple(sorted(slot.owed[g]))) for g in groups if g in slot.owed]
        if not asked:
            return  # it was lost meanwhile, and others have them
        slot.asked = time.monotonic()
        slot.submits += 1
        try:
            slot.process.submit(asked)
        except SamplerLost as error:
            self._lose(slot, error)

    def _land(self, slot: Slot, completion: Completion) -> Completion | None:
        members = slot.owed.get(completion.group, set())
        if completion.member not in members:
            return None  # aborted, or sampled twice
        if not math.isfinite(sum(completion.logprobs)):
            bad = next(i for i, value in enumerate(completion.logprobs) if not math.isfinite(value))
            raise SamplerError(
                f"group {completion.group}, member {completion.member} (task {completion.task_id}): {slot.title} gave "
                f"token {bad} of {len(completion.token_ids)} the log-prob {completion.logprobs[bad]}; its weights or "
                f"its KV are broken, nothing of it was trained on"
            )
        members.remove(completion.member)
        slot.load -= 1
        if not members:
            del slot.owed[completion.group], self._groups[completion.group]
        slot.completions += 1
        slot.deaths = 0
        return completion

    def _lose_hung(self) -> None:
        """Look now and then for samplers that are silent. A look that comes late judges nobody: this process was
        stopped or waited for nothing, and may have to hear yet what they said."""
        now = time.monotonic()
        since = now - self._looked
        if since < LOOK_SECONDS:
            return
        self._looked = now
        for slot in self._up() if since < LATE_SECONDS else ():
            silent = now - max(slot.process.heard, slot.asked)
            if slot.owed and silent > self._hang_seconds:
                self._lose(slot, SamplerLost(f"no sign of life for {silent:.0f} s at {slot.owing}"))

    def _lose(self, slot: Slot, reason: SamplerError, process: Sampler | None = None) -> None:
        """Start another process in the slot; what it owed goes to the others.

        process: which one is lost, where that may have been seen to already: placing one's work may find another lost.
        """
        if process is not None and slot.process is not process:
            return
        self._say(f"{slot.title} is lost with {slot.load} completions: {reason}")
        slot.deaths += 1
        slot.tokens += slot.process.beat.tokens
        slot.busy_seconds += slot.process.beat.busy_seconds
        slot.process.close(grace_seconds=0.0)
        if slot.deaths > RESTARTS:
            raise SamplerError(f"{slot.title} was started {slot.deaths} times and landed nothing: {reason}") from reason
        slot.restarts += 1
        slot.resampled += slot.load
        if slot.up:
            self._starting.append(slot)
        owed, slot.owed, slot.load, slot.submits, slot.up = slot.owed, {}, 0, 0, False
        del self._by_process[slot.process]
        slot.process = Sampler(slot.config, self._link(slot.number), self._inbox)
        self._by_process[slot.process] = slot
        self._place(owed)

    def _admit_ready(self) -> None:
        """See to samplers that are starting: whoever has loaded its model comes up."""
        for slot in list(self._starting):
            try:
                if slot.process.ready():
                    self._admit(slot)
            except SamplerLost as error:
                self._lose(slot, error)

    def _admit(self, slot: Slot) -> None:
        """Bring a sampler that has loaded its model to where the others are, and give it work."""
        if self._transport is not None:
            slot.process.bind(self._transport.address)
        if self._version is not None:
            [answer] = deliver(self._bound, [slot.process], self._version)
            if isinstance(answer, SamplerLost):
                raise answer
            if answer.missed:
                raise SamplerLost(f"version {self._version} did not reach the sampler: {answer.missed}")
        if self._proof is not None:
            token_ids, check = self._proof
            check(slot.number, slot.process.score(token_ids))
        slot.up = True
        self._starting.remove(slot)
        if slot.restarts:
            self._say(f"{slot.title} is up again, started {slot.restarts + 1} times")
        unplaced, self._unplaced = self._unplaced, {}
        self._place(unplaced)

    @property
    def _bound(self) -> Transport:
        if self._transport is None:
            raise ValueError("nothing can be installed before `bind`")
        return self._transport

    def _ask(self, message: object, kind: Any, what: str) -> dict[int, Any]:
        """By number, the answers of all samplers that are up, which work on it at the same time; waits for one."""
        deadline = time.monotonic() + LOAD_SECONDS
        answers: dict[int, Any] = {}
        while not answers:
            asked = []
            for slot in self._up():
                process = slot.process
                try:
                    process.send(message)
                    asked.append((slot, process))
                except SamplerLost as error:
                    self._lose(slot, error, process)
            for slot, process in asked:
                try:
                    answers[slot.number] = process.answer(kind, what)
                except SamplerLost as error:
                    self._lose(slot, error, process)
            if not answers:
                if time.monotonic() > deadline:
                    raise SamplerLost(f"waited {LOAD_SECONDS:.0f} s for a sampler that is up, for {what}")
                time.sleep(0.1)
                self._admit_ready()
        return answers
