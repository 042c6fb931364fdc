"""From what a program did to a verdict: one function for each kind of tests."""

from __future__ import annotations

import marshal
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from sandbox import compare, equal, plain
from sandbox.hints import hints
from sandbox.inside.runner import ALIVE, WALL
from sandbox.process import Jail, MachineFault, Outcome, memory_file
from sandbox.types import AssertTests, CallTests, CaseVerdict, Limits, StdinTests, Tests, Verdict

MAX_SOURCE = 1 << 20  # characters; no completion is longer, and compiling takes 100 times as much memory


class Jails(Protocol):
    """Where jails come from; the pool."""

    call_harness: int
    solution_harness: int
    tests_harness: int

    async def take(self, limits: Limits) -> Jail: ...

    def release(self, jail: Jail) -> None: ...


class Session:
    """One program, its cases, and the jail that they run in; a fresh jail when a case spoilt the last one.

    ahead: send a case while the one before it runs, as soon as one has been right.
    """

    def __init__(
        self,
        jails: Jails,
        program: str,
        inputs: list[bytes],
        limits: Limits,
        *,
        harness: int | None,
        ahead: bool,
    ) -> None:
        self.jails = jails
        self.source = program.encode("utf-8", "surrogatepass")
        self.hints = hints(program)
        self.inputs = inputs
        self.limits = limits
        self.harness = harness
        self.ahead = ahead
        self.jail: Jail | None = None
        self.sent: dict[int, tuple[int, list[int]]] = {}  # case: its number in the jail, its files

    async def start(self) -> str:
        """Send the program and its first case; what is wrong with the program, or nothing. Raises MachineFault."""
        return await self._enter(0)

    async def _enter(self, case: int) -> str:
        self.jail = await self.jails.take(self.limits)
        self.jail.load(self.source, self.hints, self.harness, self.limits)
        self._submit(case)
        return await self.jail.compiled()

    def _submit(self, case: int) -> None:
        assert self.jail is not None
        files = [memory_file(self.inputs[case]), os.memfd_create("out", os.MFD_CLOEXEC)]
        if self.harness is not None:
            files.append(os.memfd_create("result", os.MFD_CLOEXEC))
        self.sent[case] = (0, files)
        self.sent[case] = (self.jail.submit(files), files)

    async def case(self, number: int) -> tuple[Outcome, bytes]:
        """What case `number` did, and what it wrote to its result file. Raises MachineFault.

        To be called for each case in turn, after `start`.
        """
        if self.jail is None or self.jail.lost:
            self.release()
            problem = await self._enter(number)
            if problem:
                raise MachineFault(f"a program that compiled no longer does: {problem}", suspect=True)
        assert self.jail is not None
        if number not in self.sent:
            self._submit(number)
        if self.ahead and 0 < number < len(self.inputs) - 1:
            self._submit(number + 1)
        seq, files = self.sent.pop(number)
        try:
            outcome = await self.jail.result(seq, files[1])
            if len(files) == 2:
                return outcome, b""
            size = os.fstat(files[2]).st_size
            return outcome, os.pread(files[2], min(size, self.limits.output_bytes + 1), 0)
        finally:
            close_files(files)

    def release(self) -> None:
        """End the jail, if there is one, and forget the cases sent to it."""
        for _, files in self.sent.values():
            close_files(files)
        self.sent.clear()
        if self.jail is not None:
            self.jails.release(self.jail)
            self.jail = None


def close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


def problem_with(tests: Tests, limits: Limits) -> Verdict | None:
    """INFRA, with the reason, for tests that no program could be judged by."""
    reason = _malformed(tests)
    if reason is None and (limits.cpu_seconds <= 0 or limits.memory_mb < 32 or limits.output_bytes < 0):
        reason = f"limits that no program could keep: {limits}"
    return Verdict("INFRA", 0, 0, detail=reason) if reason is not None else None


def _malformed(tests: Tests) -> str | None:
    if isinstance(tests, AssertTests):
        return None if tests.code.strip() else "the tests have no code"
    if not isinstance(tests, (StdinTests, CallTests)):
        return f"tests of an unknown kind: {type(tests).__name__}"
    if not tests.cases:
        return "the tests have no cases"
    if isinstance(tests, CallTests):
        if not tests.entry_point:
            return "the tests have no entry point"
        for number, call in enumerate(tests.cases, 1):
            try:
                plain.encode([list(call.args), call.result])
            except (plain.NotPlain, TypeError) as error:
                return f"case {number}: {error}"
        return None
    if tests.compare not in ("lines", "tokens", "exact"):
        return f"unknown way to compare: {tests.compare!r}"
    for number, case in enumerate(tests.cases, 1):
        if not all(isinstance(text, str) for text in (case.input, case.output, *case.accepted)):
            return f"case {number}: inputs and outputs must be text"
    return None


async def grade_program(jails: Jails, program: str, tests: Tests, limits: Limits, stop: bool) -> Verdict:
    """The verdict on `program`. Raises MachineFault."""
    if not program.strip():
        return Verdict("NO_CODE", 0, count(tests), detail="there is no program")
    if len(program) > MAX_SOURCE:
        return Verdict("CE", 0, count(tests), detail=f"the program has {len(program)} characters")
    if isinstance(tests, StdinTests):
        return await _grade_stdin(jails, program, tests, limits, stop)
    if isinstance(tests, CallTests):
        return await _grade_call(jails, program, tests, limits, stop)
    from sandbox.grade_assert import grade_assert  # it uses this file

    return await grade_assert(jails, program, tests, limits, stop)


def count(tests: Tests) -> int:
    """How many cases the tests have."""
    return 1 if isinstance(tests, AssertTests) else len(tests.cases)


async def _grade_stdin(jails: Jails, program: str, tests: StdinTests, limits: Limits, stop: bool) -> Verdict:
    inputs = [case.input.encode("utf-8", "surrogateescape") for case in tests.cases]

    session = Session(jails, program, inputs, limits, harness=None, ahead=stop)
    if tests.checker is not None:
        return await grade_with_checker(jails, session, tests.checker, tests, stop)

    async def judge(number: int, outcome: Outcome, _: bytes) -> tuple[str, str]:
        case = tests.cases[number]
        wrong = compare.difference(outcome.output, case.output, tests.compare)
        if wrong and not any(compare.matches(outcome.output, other, tests.compare) for other in case.accepted):
            return "WA", wrong
        return "AC", ""

    return await grade_cases(session, "stdin", judge, stop)


CHECKER_LIMITS = Limits(cpu_seconds=10.0, memory_mb=512, output_bytes=1 << 16)


class BrokenTests(Exception):
    """The tests cannot judge any program; the reason."""


async def grade_with_checker(jails: Jails, session: Session, checker: str, tests: StdinTests, stop: bool) -> Verdict:
    """As `grade_cases`, where a checker in a jail of its own decides. A broken one is INFRA. Raises MachineFault."""
    checking = Session(jails, checker, [b""], CHECKER_LIMITS, harness=jails.call_harness, ahead=False)

    async def ask(given: str, output: str, expected: str) -> bool | None:
        """What the checker says; None if it says nothing."""
        checking.inputs = [call_input("check", (given, output, expected), {})]
        if checking.jail is None and await checking.start():
            raise BrokenTests("the checker does not compile")
        outcome, result = await checking.case(0)
        if fate(outcome, CHECKER_LIMITS)[0] != "AC" or result not in (b"true", b"false"):
            return None
        return result == b"true"

    async def judge(number: int, outcome: Outcome, _: bytes) -> tuple[str, str]:
        case = tests.cases[number]
        said = await ask(case.input, outcome.output.decode("utf-8", "surrogateescape"), case.output)
        if said is None:
            # Did the output upset the checker, or would anything? The expected output must be right.
            if not await ask(case.input, case.output, case.output):
                raise BrokenTests(f"the checker does not accept the expected output of case {number + 1}")
            return "WA", "the checker fails on this output, though not on the expected one"
        return ("AC", "") if said else ("WA", "the checker says no")

    try:
        return await grade_cases(session, "checker", judge, stop)
    except BrokenTests as error:
        return Verdict("INFRA", 0, 0, detail=str(error))
    finally:
        checking.release()


def call_input(entry_point: str, args: tuple[object, ...], named: dict[str, object]) -> bytes:
    """What a call's process reads, for inside/call.py. Version 2 of marshal is the same in all Pythons."""
    value: Any = (entry_point, args, named)
    return marshal.dumps(value, 2)


async def _grade_call(jails: Jails, program: str, tests: CallTests, limits: Limits, stop: bool) -> Verdict:
    inputs = [call_input(tests.entry_point, case.args, {}) for case in tests.cases]

    async def judge(number: int, _: Outcome, result: bytes) -> tuple[str, str]:
        return _judge_result(result, tests.cases[number].result, limits)

    session = Session(jails, program, inputs, limits, harness=jails.call_harness, ahead=stop)
    return await grade_cases(session, "call", judge, stop)


Judge = Callable[[int, Outcome, bytes], Awaitable[tuple[str, str]]]


async def grade_cases(session: Session, kind: str, judge: Judge, stop: bool) -> Verdict:
    """Run the session's cases in turn; `judge` decides about those that ended well. Raises MachineFault."""
    total = len(session.inputs)
    try:
        problem = await session.start()
        if problem:
            return Verdict("CE", 0, total, detail=problem)
        tally = Tally(kind, total, session.limits, stop)
        for number in range(total):
            outcome, result = await session.case(number)
            verdict, detail = fate(outcome, session.limits)
            if verdict == "AC":
                verdict, detail = await judge(number, outcome, result)
            if tally.add(outcome, verdict, detail):
                break
        return tally.verdict()
    finally:
        session.release()


def _judge_result(result: bytes, expected: object, limits: Limits) -> tuple[str, str]:
    if not result:
        return "RE", "no result: the program ended before the function returned"
    if len(result) > limits.output_bytes:
        return "OLE", "the result is too large"
    try:
        value = plain.decode(result)
    except plain.NotPlain as error:
        return "RE", f"the result is {error}"
    wrong = equal.unlike(value, expected)
    return ("WA", wrong) if wrong else ("AC", "")


def fate(outcome: Outcome, limits: Limits) -> tuple[str, str]:
    """AC if the case ended by itself, in time and with exit code 0; else what befell it, and in words."""
    if outcome.oom or outcome.memory_mb > limits.memory_mb:
        return "MLE", f"more than {limits.memory_mb} MiB of memory"
    if outcome.overflow:
        return "OLE", f"more than {limits.output_bytes} bytes of output"
    if outcome.reason == WALL:
        return "TLE", f"asleep: {outcome.wall:.1f} s of wall time, {outcome.cpu:.2f} s of CPU time"
    if outcome.reason != ALIVE or outcome.cpu >= limits.cpu_seconds:
        return "TLE", f"more than {limits.cpu_seconds:g} s of CPU time"
    if os.WIFSIGNALED(outcome.status):
        return "RE", f"killed by signal {os.WTERMSIG(outcome.status)}"
    code = os.WEXITSTATUS(outcome.status)
    if code != 0:
        last = outcome.errors.strip().rsplit("\n", 1)[-1]
        if last.startswith("MemoryError"):
            return "MLE", "MemoryError"
        return "RE", f"exit code {code}"
    return "AC", ""


class Tally:
    """Counts cases, and remembers the first failure."""

    def __init__(self, kind: str, total: int, limits: Limits, stop: bool) -> None:
        self.kind = kind
        self.total = total
        self.limits = limits
        self.stop = stop
        self.cases: list[CaseVerdict] = []
        self.first = ("AC", "")
        self.started = time.monotonic()

    def add(self, outcome: Outcome, verdict: str, detail: str) -> bool:
        """Count a case; whether to run no more."""
        case = CaseVerdict(verdict, round(outcome.cpu, 6), round(outcome.wall, 6), round(outcome.memory_mb, 2))
        self.cases.append(case)
        if verdict != "AC" and self.first[0] == "AC":
            tail = outcome.errors.strip()[-200:]
            said = f"; stderr ends: {tail!r}" if tail else ""
            self.first = (
                verdict,
                f"case {len(self.cases)} of {self.total} ({self.kind}): {verdict}, {detail}{said}",
            )
        if len(self.cases) == self.total or (self.stop and verdict != "AC"):
            return True
        spent = sum(case.cpu_seconds for case in self.cases)
        if spent < self.limits.program_cpu_seconds:
            return False
        if self.first[0] == "AC":
            budget = f"all cases together took {spent:.1f} s of CPU time, more than {self.limits.program_cpu_seconds:g}"
            self.first = ("TLE", f"after case {len(self.cases)} of {self.total}: TLE, {budget}")
        return True

    def verdict(self, *, soft: bool = False) -> Verdict:
        """The program's: that of its first failure."""
        return Verdict(
            verdict=self.first[0],
            passed=sum(case.verdict == "AC" for case in self.cases),
            total=self.total,
            cases=tuple(self.cases),
            detail=self.first[1],
            soft=soft,
            cpu_seconds=sum(case.cpu_seconds for case in self.cases),
            wall_seconds=time.monotonic() - self.started,
            memory_mb=max((case.memory_mb for case in self.cases), default=0.0),
        )
