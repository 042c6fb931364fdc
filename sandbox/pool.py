"""Warm jails, one for each program, as many at once as there are workers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType

from sandbox import cgroup, janitor
from sandbox.grade import grade_program, problem_with
from sandbox.jail import Interpreter, argv, bytecode, find_interpreter, find_nsjail
from sandbox.policy import bpf
from sandbox.process import Jail, MachineFault
from sandbox.selftest import require as require_protections
from sandbox.types import Limits, SandboxError, StdinCase, StdinTests, Tests, Verdict
from sandbox.zygote import Zygote, sealed_file, spawn

DEFAULT_PRELOAD = ("collections", "heapq", "bisect", "itertools", "functools", "math", "re")
SPARE_SECONDS = 3600.0  # an older spare is thrown away: nsjail would end it before long
RECOVERY = 32  # good programs before a throttled pool gets one worker back
DEFAULT_LIMITS = Limits()
CANARY = "print(int(input()) + 1)\n"


@dataclass(slots=True)
class Stats:
    """Counters of a pool since it started."""

    programs: int = 0
    verdicts: collections.Counter[str] = field(default_factory=collections.Counter)
    infra_retries: int = 0
    soft: int = 0
    jails: int = 0
    nsjails: int = 0
    cold_starts: int = 0
    width: int = 0
    last_fault: str = ""


class Pool:
    """Grades programs in single-use jails. An asynchronous context manager; usable in any thread's event loop.

    workers: programs at once, no more than the cores that grading may use. python: the jails' interpreter.
    numpy: whether programs may import it. preload: modules that every spare imports. require: names of
    `selftest`'s protections without which the pool does not start. backoff: seconds before each retry of a
    program that the machine failed. recycle: jails that one nsjail makes before a fresh one takes its place; 1 is a
    whole nsjail for each program. use_cgroups: False leaves memory to rlimits even where cgroups can be written.
    Raises SandboxError on entering when jails do not work here, or when a required protection is missing.
    """

    def __init__(
        self,
        workers: int,
        *,
        python: str = "/usr/bin/python3",
        numpy: bool = False,
        preload: tuple[str, ...] = DEFAULT_PRELOAD,
        require: tuple[str, ...] = (),
        backoff: tuple[float, ...] = (0.5, 2.0, 8.0),
        recycle: int = 500,
        use_cgroups: bool = True,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.workers = workers
        self.python = python
        self.numpy = numpy
        self.preload = preload
        self.require = require
        self.backoff = backoff
        self.recycle = recycle
        self.use_cgroups = use_cgroups
        self.stats = Stats(width=workers)
        self.memory_backend = "rlimits"
        self._interpreter: Interpreter | None = None
        self._command: list[str] = []
        self._filter = -1
        self._zygotes: list[Zygote] = []
        self._zygote_lock = asyncio.Lock()
        self.nsjail = ""
        self._code = -1
        self.call_harness = self.solution_harness = self.tests_harness = -1
        self._sealed: list[int] = []
        self._hierarchy: cgroup.Hierarchy | None = None
        self._groups: list[cgroup.Group] = []
        self._free_groups: list[cgroup.Group] = []
        self._janitor: janitor.Janitor | None = None
        self._spares: collections.deque[asyncio.Task[Jail]] = collections.deque()
        self._closing: set[asyncio.Task[None]] = set()
        self._running = 0
        self._good = 0
        self._turn = asyncio.Condition()
        self._open = False

    async def __aenter__(self) -> Pool:
        self.nsjail = find_nsjail()
        self._interpreter = find_interpreter(self.python, self.numpy)
        code = bytecode(self._interpreter.path, "runner.py", "program.py", "zygote.py")
        if self.require:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._prove)
        self._code = self._keep(code)
        common = ("../plain.py", "names.py")
        wire = (*common, "wire.py")
        self.call_harness = self._seal(*common, "call.py")
        self.solution_harness = self._seal(*wire, "solution.py")
        self.tests_harness = self._seal(*wire, "little_pytest.py", "tests.py")
        try:
            self._start_groups()
            shared_memory = self._hierarchy is not None
            self._filter = self._keep(bpf(shared_memory=shared_memory))
            self._command = argv(self.nsjail, self._interpreter, self.preload, shared_memory=shared_memory)
            self._open = True
            for _ in range(self.workers):
                self._add_spare()
            # The first jail must start, or nothing ever will.
            await asyncio.shield(self._spares[0])
        except BaseException as error:
            await self._shut()
            if isinstance(error, MachineFault):
                raise SandboxError(str(error)) from error
            raise
        return self

    def _seal(self, *files: str) -> int:
        """A sealed file with the bytecode of these files of this folder."""
        assert self._interpreter is not None
        return self._keep(bytecode(self._interpreter.path, *files))

    def _keep(self, data: bytes) -> int:
        self._sealed.append(sealed_file(data))
        return self._sealed[-1]

    def _prove(self) -> None:
        require_protections(self.require, self.python, numpy=self.numpy, use_cgroups=self.use_cgroups)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._shut()

    def _start_groups(self) -> None:
        self._hierarchy = cgroup.find_hierarchy()[0] if self.use_cgroups else None
        if self._hierarchy is None:
            return
        cgroup.sweep(self._hierarchy)
        try:
            # Twice the workers, and some for jails that are on their way out or that run a checker.
            for number in range(3 * self.workers + 2):
                name = f"{cgroup.PREFIX}{os.getpid()}-{id(self):x}-{number}"
                self._groups.append(cgroup.make_group(self._hierarchy, name))
        except OSError as error:
            raise SandboxError(f"cgroups are there but cannot be made: {error}") from error
        self._free_groups = list(self._groups)
        self.memory_backend = f"cgroup v{self._hierarchy.version}"
        self._janitor = janitor.start([group.folder for group in self._groups])

    async def quiet(self) -> None:
        """Wait until every spare is ready and every ended jail is gone. For measurements and tests."""
        while self._closing or any(not spare.done() for spare in self._spares):
            await asyncio.wait([*self._closing, *self._spares])

    async def _shut(self) -> None:
        self._open = False
        spares, self._spares = list(self._spares), collections.deque()
        for spare in spares:
            self._discard_spare(spare)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        for zygote in self._zygotes:
            await zygote.close()
        self._zygotes.clear()
        for group in self._groups:
            cgroup.remove_group(group)
        self._groups.clear()
        if self._janitor is not None:
            await self._janitor.stop()
            self._janitor = None
        for descriptor in self._sealed:
            os.close(descriptor)
        self._sealed.clear()

    async def grade(
        self, program: str, tests: Tests, limits: Limits = DEFAULT_LIMITS, *, stop_at_first_failure: bool = True
    ) -> Verdict:
        """Run `program` against `tests` and say what it did.

        A problem of the tests themselves is a Verdict of INFRA at once. Raises SandboxError when the machine
        failed at every try; waits its turn when all workers are busy.
        """
        if not self._open:
            raise SandboxError("the pool is not open")
        problem = problem_with(tests, limits)
        if problem is not None:
            return self._count(problem)
        faults: list[MachineFault] = []
        for pause in (0.0, *self.backoff):
            if faults:
                self._throttle()
                await asyncio.sleep(pause)
            try:
                async with self._worker():
                    verdict = await grade_program(self, program, tests, limits, stop_at_first_failure)
            except MachineFault as fault:
                faults.append(fault)
                self.stats.infra_retries += 1
                self.stats.last_fault = str(fault)
                continue
            self._recover()
            return self._count(verdict)
        self.stats.infra_retries -= 1
        if all(fault.suspect for fault in faults) and await self._healthy():
            detail = f"the program ended its jail at each of {len(faults)} tries, and an honest one did not"
            return self._count(Verdict("RE", 0, 0, detail=detail))
        raise SandboxError(f"{faults[-1]} ({len(faults)} tries)")

    async def _healthy(self) -> bool:
        """Whether an honest program still passes. Raises MachineFault."""
        async with self._worker():
            tests = StdinTests((StdinCase("1\n", "2\n"),))
            return (await grade_program(self, CANARY, tests, Limits(), True)).verdict == "AC"

    def _count(self, verdict: Verdict) -> Verdict:
        self.stats.programs += 1
        self.stats.verdicts[verdict.verdict] += 1
        self.stats.soft += verdict.soft
        return verdict

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[None]:
        """A turn to run: no more programs at once than the present width."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._running < self.stats.width)
            self._running += 1
        try:
            yield
        finally:
            async with self._turn:
                self._running -= 1
                self._turn.notify_all()

    def _throttle(self) -> None:
        self.stats.width = max(1, self.stats.width // 2)
        self._good = 0

    def _recover(self) -> None:
        self._good += 1
        if self.stats.width < self.workers and self._good % RECOVERY == 0:
            self.stats.width += 1

    async def take(self, limits: Limits) -> Jail:
        """A jail that no program has been in: a spare, if it is of the right kind. Raises MachineFault."""
        if limits.tmp_mb != Limits().tmp_mb:
            self.stats.cold_starts += 1
            return await self._make(limits.tmp_mb)
        while self._spares:
            spare = self._ready_spare()
            try:
                jail = await asyncio.shield(spare)
            except MachineFault as fault:
                self.stats.last_fault = str(fault)
                continue
            except asyncio.CancelledError:
                self._discard_spare(spare)
                raise
            if jail.channel.ended or time.monotonic() - jail.started > SPARE_SECONDS:
                jail.lost = True
                self.release(jail)
                continue
            self._add_spare()
            return jail
        self._add_spare()
        self.stats.cold_starts += 1
        return await self._make(limits.tmp_mb)

    def _ready_spare(self) -> asyncio.Task[Jail]:
        """The first spare that is ready, else the oldest."""
        for index, spare in enumerate(self._spares):
            if spare.done():
                del self._spares[index]
                return spare
        return self._spares.popleft()

    def release(self, jail: Jail) -> None:
        """End a jail in the background and take its group back."""
        self._later(self._end(jail))

    async def _end(self, jail: Jail) -> None:
        await jail.close()
        if jail.group is not None:
            self._free_groups.append(jail.group)
        for zygote in [z for z in self._zygotes if z.used >= self.recycle or not z.alive]:
            if zygote.living == 0:
                self._zygotes.remove(zygote)
                await zygote.close()

    def _add_spare(self) -> None:
        if self._open and len(self._spares) < self.workers:
            self._spares.append(asyncio.get_running_loop().create_task(self._make(Limits().tmp_mb)))

    def _discard_spare(self, spare: asyncio.Task[Jail]) -> None:
        async def discard() -> None:
            with contextlib.suppress(MachineFault):  # a spare that never started needs no end
                await self._end(await spare)

        self._later(discard())

    def _later(self, work: collections.abc.Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _make(self, tmp_mb: int) -> Jail:
        """A fresh jail, from the zygote with the fewest. Raises MachineFault."""
        group = await self._group()
        zygote = None
        try:
            zygote = await self._zygote()
            jail = await zygote.jail(tmp_mb, group)
        except BaseException:
            if group is not None:
                self._free_groups.append(group)
            raise
        self.stats.jails += 1
        return jail

    async def _zygote(self) -> Zygote:
        """One that can make another jail; all workers have one, and a fresh one is started when it is due."""
        async with self._zygote_lock:
            fit = [z for z in self._zygotes if z.alive and z.used < self.recycle and self._young(z)]
            if len(fit) >= self.workers:
                return min(fit, key=lambda zygote: zygote.living)
            zygote = spawn(self._command, self._code, self._filter)
            self.stats.nsjails += 1
            try:
                await zygote.ready()
            except BaseException:
                await zygote.close()
                raise
            self._zygotes.append(zygote)
            return zygote

    @staticmethod
    def _young(zygote: Zygote) -> bool:
        return time.monotonic() - zygote.started < SPARE_SECONDS

    async def _group(self) -> cgroup.Group | None:
        if self._hierarchy is None:
            return None
        while not self._free_groups:
            await asyncio.sleep(0.005)
        return self._free_groups.pop()
