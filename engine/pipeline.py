"""Groups in, graded groups out: completions are graded as they land, while others are sampled and others trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import RunError
from engine.rollout.messages import Group
from engine.types import Completion, Graded

LANDED_SECONDS = 1800.0
"""Between two completions of whatever is being sampled; a sampler that hangs is found by its heartbeat long before."""


class Source(Protocol):
    """What samples: `engine.rollout.Samplers`."""

    def submit(self, groups: Sequence[Group]) -> None:
        """Queue groups."""

    def poll(self) -> Completion | None:
        """The next completion, if one lands within a moment."""

    def abort(self, groups: Sequence[int]) -> None:
        """Drop what is left of groups."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A graded group, its members in their order, and when the last of them landed (`time.monotonic`)."""

    members: list[Graded]
    landed: float


@dataclass(slots=True)
class _Pending:
    future: Future[Finished]
    size: int
    graded: list[Future[Graded]] = field(default_factory=list)
    landed: float = 0.0


class Pipeline:
    """One thread that takes completions from the samplers, hands them to the grader and finishes groups.

    An error of samplers or grader ends it: every future raises it, and so does every later `submit`.
    """

    def __init__(self, source: Source, grade: Callable[[Completion], Future[Graded]]) -> None:
        self._source, self._grade = source, grade
        self._pending: dict[int, _Pending] = {}
        self._owed = 0
        """Completions of those that are still to land."""
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="pipeline", daemon=True)
        self._thread.start()

    def submit(self, groups: Sequence[Group]) -> list[Future[Finished]]:
        """Sample and grade groups; a future for each, in their order."""
        with self._changed:
            if self._error is not None:
                raise self._error
            made = {group.group: _Pending(Future(), len(group.seeds)) for group in groups}
            self._pending |= made
            self._owed += sum(pending.size for pending in made.values())
            self._source.submit(groups)
            self._changed.notify()
        return [pending.future for pending in made.values()]

    def abort(self) -> None:
        """Drop every group that is not finished; its future is cancelled."""
        self._source.abort(self._drop())

    def close(self) -> None:
        """End the thread and drop what is unfinished, so that a grader which is closed next has nobody to tell."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._drop()

    def _drop(self) -> list[int]:
        with self._changed:
            dropped, self._pending, self._owed = self._pending, {}, 0
        for pending in dropped.values():
            pending.future.cancel()
        return list(dropped)

    def _work(self) -> None:
        try:
            heard = time.monotonic()
            while True:
                with self._changed:
                    while not self._owed and not self._closed:
                        self._changed.wait()
                        heard = time.monotonic()
                    if self._closed:
                        return
                completion = self._source.poll()
                if completion is not None:
                    heard = time.monotonic()
                    self._land(completion)
                elif time.monotonic() - heard > LANDED_SECONDS:
                    owed = [number for number, pending in self._pending.items() if len(pending.graded) < pending.size]
                    raise RunError(f"no completion landed for {LANDED_SECONDS:.0f} s, groups {owed} are owed")
        except BaseException as error:  # it belongs to whoever waits for a group
            with self._changed:
                self._error, failed, self._pending, self._owed = error, self._pending, {}, 0
            for pending in failed.values():
                pending.future.set_exception(error)

    def _land(self, completion: Completion) -> None:
        graded = self._grade(completion)
        with self._changed:
            pending = self._pending.get(completion.group)
            if pending is None:
                return  # aborted
            pending.graded.append(graded)
            self._owed -= 1
            pending.landed = time.monotonic()
            whole = len(pending.graded) == pending.size
        if whole:
            left = [pending.size]

            def one_more(_: Future[Graded]) -> None:
                with self._changed:
                    left[0] -= 1
                    done = left[0] == 0
                if done:
                    self._finish(completion.group)

            for future in pending.graded:
                future.add_done_callback(one_more)

    def _finish(self, number: int) -> None:
        with self._changed:
            pending = self._pending.pop(number, None)
        if pending is None:
            return  # aborted, or ended by an error
        errors = [error for future in pending.graded if (error := future.exception()) is not None]
        if errors:
            pending.future.set_exception(errors[0])
            return
        members = sorted((future.result() for future in pending.graded), key=lambda g: g.completion.member)
        pending.future.set_result(Finished(members, pending.landed))


class Ahead:
    """Keeps sampling up to `max_lag` policy versions ahead of training.

    Version v trains its step on per_step groups, and what is submitted at version v must be trained by version
    v + max_lag: so at v no more than per_step * (v + 1 + max_lag) groups may have been submitted, discarded ones aside.
    """

    def __init__(
        self,
        submit: Callable[[int], list[Future[Finished]]],
        *,
        per_step: int,
        steps: int,
        max_lag: int,
        extra: int = 0,
        version: int = 0,
    ) -> None:
        """submit: starts that many groups. extra: groups that may stand in the queue beyond the batch. version: the
        policy's that training goes on from."""
        self._submit, self._per_step, self._steps = submit, per_step, steps
        self._max_lag, self._extra = max_lag, extra
        self._queue: list[Future[Finished]] = []
        self._submitted = per_step * version
        self._discarded = 0
        self.too_old = 0
        """Groups that were dropped because a token of theirs was older than max_lag allows."""

    @property
    def untaken(self) -> list[Future[Finished]]:
        """Groups that were submitted and not taken yet, oldest first."""
        return list(self._queue)

    def fill(self, version: int) -> None:
        """Submit as many groups as may be under way at this version."""
        steps = min(version + 1 + self._max_lag, self._steps)
        missing = self._per_step * steps + self._extra - (self._submitted - self._discarded)
        if missing > 0:
            self._submitted += missing
            self._queue += self._submit(missing)

    def take(self, count: int, version: int) -> list[Finished]:
        """The next `count` whole groups, oldest first among those that are ready; waits for them.

        A group with a token more than max_lag versions old is dropped, counted and replaced.
        """
        taken: list[Finished] = []
        while len(taken) < count:
            self.fill(version)
            done, _ = wait(self._queue, return_when=FIRST_COMPLETED)
            for future in [f for f in self._queue if f in done][: count - len(taken)]:
                self._queue.remove(future)
                finished = future.result()
                if version - min(member.completion.version for member in finished.members) > self._max_lag:
                    self.too_old += 1
                    self.discard(1)
                else:
                    taken.append(finished)
        return taken

    def discard(self, count: int) -> None:
        """That many of the groups taken are not trained: others may take their places."""
        self._discarded += count
