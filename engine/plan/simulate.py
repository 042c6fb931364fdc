"""A run as events: samplers, driver, graders and trainer, what each takes, and the lag that `engine.pipeline` allows.

A sampler decodes all its sequences together: one engine step gives each of them a token and takes
`decode_seconds + decode_sequence_seconds * sequences`. A group goes whole to the sampler that owes least. The driver
takes finished completions one at a time, the graders judge them in that order, and the trainer takes whole groups as
`engine.pipeline.Ahead` does. Evaluations and the refilling of groups without a signal are no part of it. Nothing is
random: the same input gives the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

ALMOST = 1e-6
"""Tokens: a sequence that is so close to its end is there."""
SYNC_STEPS = 1.5
"""Engine steps that a sync waits for where there are sequences: on average half of one until the weights can be
written, and one more until the canary has its turn. The sampler decodes meanwhile."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How many of each, and how much a step trains."""

    samplers: int
    trainers: int
    graders: int
    """Programs judged at once."""
    prompts_per_step: int
    group_size: int
    max_lag: int = 0
    oversample: int = 0
    """Groups sampled beyond those that a step trains."""


@dataclass(frozen=True, slots=True)
class Phases:
    """What each stage takes."""

    decode_seconds: float
    """Of an engine step, whatever it decodes."""
    decode_sequence_seconds: float
    """That each sequence adds to it."""
    lengths: tuple[tuple[int, ...], ...]
    """Tokens of the completions of a group, for as many groups as are known; they are gone through again and again."""
    grade_seconds: float
    """Of one program on one grader."""
    train_token_seconds: float
    """Of a sampled token, or a prompt's, on one trainer."""
    train_step_seconds: float = 0.0
    """Of a step beside its tokens, on every trainer."""
    exchange_seconds: float = 0.0
    """Of adding up the trainers' gradients, a step."""
    sync_seconds: float = 0.0
    """Of a version's way to the samplers, which pause for it."""
    max_sequences: int = 256
    """That a sampler decodes at once; the others wait."""
    prompt_tokens: int = 0
    prefill_token_seconds: float = 0.0
    """Of a token that is read, not sampled: a prompt's, and after a sync those of every sequence under way."""
    landing_seconds: float = 0.0
    """Of the driver, for each completion, one after the other, while others are sampled."""
    record_seconds: float = 0.0
    """Of the driver, for each completion of a step, after the step."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step; seconds since the run's start but for `busy`."""

    asked: float
    """The trainer had nothing to do from here on."""
    landed: float
    """The last completion of its groups was there, or `asked` if it was there before."""
    taken: float
    trained: float
    synced: float
    end: float
    tokens: int
    """Sampled, in its groups."""
    oldest: int
    """Versions that the oldest group was behind."""
    sampler_busy_seconds: float
    """Of all samplers together, until `end`."""


@dataclass(slots=True)
class Group:
    """One prompt's completions on their way."""

    number: int
    submitted_version: int
    lengths: tuple[int, ...]
    left: int
    """Members that are not sampled yet."""
    version: int = 1 << 30
    """Of its oldest token."""
    landed: float = 0.0
    ready: float = 0.0
    """Graded whole."""
    taken: float | None = None
    dropped: bool = False
    """Too old when it was taken."""


@dataclass(frozen=True, slots=True)
class Trace:
    """All that happened."""

    steps: tuple[Step, ...]
    groups: tuple[Group, ...]
    grading: tuple[tuple[float, float], ...]
    """When each program was begun and finished."""


@dataclass(slots=True)
class _Sampler:
    phases: Phases
    version: int = 0
    owed: int = 0
    busy_seconds: float = 0.0
    waiting: deque[tuple[Group, int]] = field(default_factory=deque)
    running: list[tuple[float, int, Group, int]] = field(default_factory=list)
    """A heap of (the progress at which it ends, a number, its group, its tokens)."""
    epoch: int = 0
    """Counts its changes: an end that was foreseen before one is void."""
    progress: float = 0.0
    """Tokens that a sequence which was always there would have."""
    clock: float = 0.0
    free_at: float = 0.0
    """It reads prompts or pauses until then."""
    count: int = 0
    read: int = -1
    """The group whose prompt it read last: members enter one after the other, so it need know no other."""

    def step_seconds(self) -> float:
        return self.phases.decode_seconds + self.phases.decode_sequence_seconds * len(self.running)

    def advance(self, now: float) -> None:
        start = max(self.clock, self.free_at)
        if self.running and now > start:
            self.busy_seconds += now - start
            self.progress += (now - start) / self.step_seconds()
        self.clock = max(self.clock, now)

    def finished(self, now: float) -> list[Group]:
        """The groups of the sequences that have ended, each as often as it has some."""
        self.advance(now)
        ended = []
        while self.running and self.running[0][0] <= self.progress + ALMOST:
            ended.append(heapq.heappop(self.running)[2])
        return ended

    def admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self.phases.max_sequences:
            group, length = self.waiting.popleft()
            group.version = min(group.version, self.version)
            if group.number != self.read:
                self.read = group.number
                self._read(self.phases.prompt_tokens, now)
            heapq.heappush(self.running, (self.progress + length, self.count, group, length))
            self.count += 1
        self.epoch += 1

    def pause(self, now: float, until: float) -> None:
        """Take a new version; what is under way is read again under it, also what was being read."""
        self.advance(now)
        self.busy_seconds -= max(0.0, self.free_at - now)
        self.free_at = until
        self.read = -1
        done = sum(length - (end - self.progress) for end, _, _, length in self.running)
        prompts = len({group.number for _, _, group, _ in self.running})
        self._read(done + self.phases.prompt_tokens * prompts, until)
        self.epoch += 1

    def next_end(self) -> float:
        return max(self.clock, self.free_at) + (self.running[0][0] - self.progress) * self.step_seconds()

    def _read(self, tokens: float, now: float) -> None:
        seconds = tokens * self.phases.prefill_token_seconds
        self.free_at = max(self.free_at, now) + seconds
        self.busy_seconds += seconds


class _Run:
    def __init__(self, setup: Setup, phases: Phases, steps: int) -> None:
        self.setup, self.phases, self.count = setup, phases, steps
        self.now = 0.0
        self.samplers = [_Sampler(phases) for _ in range(setup.samplers)]
        self.graders = [0.0] * setup.graders
        self.driver_free = 0.0
        self.groups: list[Group] = []
        self.ready: list[int] = []
        self.discarded = 0
        self.grading: list[tuple[float, float]] = []
        self.steps: list[Step] = []
        self.events: list[tuple[float, int, int, int]] = []
        """(when, a number, a sampler or -1, its epoch or the group that is ready)"""
        self.made = 0

    def trace(self) -> Trace:
        trainer = self.train()
        wake = next(trainer)
        while True:
            group_first = self.events and (wake is None or self.events[0][0] <= wake)
            if group_first:
                when, _, sampler, what = heapq.heappop(self.events)
                self.now = when
                if sampler >= 0:
                    if what == self.samplers[sampler].epoch:
                        self.land(sampler)
                    continue
                self.ready.append(what)
                if wake is not None:
                    continue  # the trainer is at work
            elif wake is None:
                raise RuntimeError("nothing is under way and the trainer waits")  # a bug
            else:
                self.now = wake
            try:
                wake = next(trainer)
            except StopIteration:
                return Trace(tuple(self.steps), tuple(self.groups), tuple(self.grading))

    def train(self) -> Generator[float | None, None, None]:
        """The trainer's loop: gives when it is to be woken, or None where it waits for a group."""
        setup, phases = self.setup, self.phases
        for version in range(self.count):
            asked, taken = self.now, list[Group]()
            wanted = setup.prompts_per_step + setup.oversample
            while len(taken) < wanted:  # Ahead.take
                self.fill(version)
                if not self.ready:
                    yield None
                for number in sorted(self.ready)[: wanted - len(taken)]:
                    self.ready.remove(number)
                    group = self.groups[number]
                    group.taken = self.now
                    if version - group.version > setup.max_lag:
                        group.dropped = True
                        self.discarded += 1
                    else:
                        taken.append(group)
            self.discarded += setup.oversample
            at = self.now
            yield at + train_seconds(setup, phases, [g.lengths for g in taken[: setup.prompts_per_step]])
            trained = self.now
            stepping = max((s.step_seconds() for s in self.samplers if s.running), default=0.0)
            synced = trained + phases.sync_seconds + SYNC_STEPS * stepping
            for index, sampler in enumerate(self.samplers):
                sampler.version = version + 1
                sampler.pause(trained, trained + phases.sync_seconds)
                self.foresee(index)
            yield synced
            yield synced + phases.record_seconds * sum(len(g.lengths) for g in taken)
            for sampler in self.samplers:
                sampler.advance(self.now)
            self.steps.append(
                Step(
                    asked=asked,
                    landed=min(at, max(asked, *(g.landed for g in taken))),
                    taken=at,
                    trained=trained,
                    synced=synced,
                    end=self.now,
                    tokens=sum(sum(g.lengths) for g in taken),
                    oldest=max(version - g.version for g in taken),
                    sampler_busy_seconds=sum(s.busy_seconds for s in self.samplers),
                )
            )

    def fill(self, version: int) -> None:
        """Ahead.fill: submit as many groups as may be under way at this version."""
        steps = min(version + 1 + self.setup.max_lag, self.count)
        under_way = len(self.groups) - self.discarded
        touched = set()
        for _ in range(self.setup.prompts_per_step * steps + self.setup.oversample - under_way):
            number = len(self.groups)
            lengths = self.phases.lengths[number % len(self.phases.lengths)][: self.setup.group_size]
            group = Group(number, version, lengths, left=len(lengths))
            self.groups.append(group)
            index = min(range(len(self.samplers)), key=lambda i: self.samplers[i].owed)
            self.samplers[index].owed += len(lengths)
            self.samplers[index].waiting.extend((group, length) for length in lengths)
            touched.add(index)
        for index in touched:
            self.samplers[index].advance(self.now)
            self.samplers[index].admit(self.now)
            self.foresee(index)

    def land(self, index: int) -> None:
        """The sequences of a sampler that end now go to the driver and to a grader."""
        sampler = self.samplers[index]
        for group in sampler.finished(self.now):
            sampler.owed -= 1
            group.left -= 1
            self.driver_free = max(self.driver_free, self.now) + self.phases.landing_seconds
            start = max(self.driver_free, self.graders[0])
            end = start + self.phases.grade_seconds
            heapq.heapreplace(self.graders, end)
            self.grading.append((start, end))
            group.landed, group.ready = self.driver_free, max(group.ready, end)
            if group.left == 0:
                self.event(group.ready, -1, group.number)
        sampler.admit(self.now)
        self.foresee(index)

    def foresee(self, index: int) -> None:
        sampler = self.samplers[index]
        if sampler.running:
            self.event(sampler.next_end(), index, sampler.epoch)

    def event(self, when: float, sampler: int, what: int) -> None:
        heapq.heappush(self.events, (when, self.made, sampler, what))
        self.made += 1


def train_seconds(setup: Setup, phases: Phases, groups: Sequence[Sequence[int]]) -> float:
    """Of a step on groups of completions of so many tokens: the trainer with the most to do sets the time.

    A completion is never split, so with more trainers than completions the longest of them is the step.
    """
    shared = phases.prompt_tokens / setup.group_size
    sizes = sorted((length + shared for group in groups for length in group), reverse=True)
    loads = [0.0] * setup.trainers
    for size in sizes:
        heapq.heapreplace(loads, loads[0] + size)
    exchange = phases.exchange_seconds if setup.trainers > 1 else 0.0
    return max(loads) * phases.train_token_seconds + phases.train_step_seconds + exchange


def simulate(setup: Setup, phases: Phases, steps: int) -> Trace:
    """A run of so many steps.

    Raises ValueError where a group of `lengths` has fewer members than `group_size`, there is none of something, or an
    engine step takes no time.
    """
    least = min((len(group) for group in phases.lengths), default=0)
    if least < setup.group_size or min(setup.samplers, setup.trainers, setup.graders, setup.prompts_per_step) < 1:
        raise ValueError(f"{setup} with groups of {least} known lengths: there must be at least one of each")
    if phases.decode_seconds <= 0:
        raise ValueError(f"an engine step of {phases.decode_seconds} seconds: it must take some time")
    return _Run(setup, phases, steps).trace()
