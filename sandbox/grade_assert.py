"""Verdicts from test code: call cases where it can be read as such, else two jails, else, and said so, one."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import socket
from dataclasses import replace

from sandbox import plain
from sandbox.assert_convert import ConvertedAssert, convert, holds
from sandbox.grade import Jails, Session, Tally, call_input, close_files, fate, grade_cases
from sandbox.hints import hints
from sandbox.process import Jail, Outcome, memory_file
from sandbox.types import AssertTests, Limits, Verdict

TESTS_PATIENCE = 3.0  # the tests' own limits, as a multiple of the program's


async def grade_assert(jails: Jails, program: str, tests: AssertTests, limits: Limits, stop: bool) -> Verdict:
    """The verdict on `program`. Raises MachineFault."""
    cases = convert(tests.code, tests.entry_point)
    if cases is not None:
        return await _grade_converted(jails, program, tests, cases, limits, stop)
    verdict = await _grade_two_jails(jails, program, tests, limits)
    return verdict if verdict is not None else await _grade_shared(jails, program, tests, limits)


async def _grade_converted(
    jails: Jails,
    program: str,
    tests: AssertTests,
    cases: tuple[ConvertedAssert, ...],
    limits: Limits,
    stop: bool,
) -> Verdict:
    inputs = [call_input(tests.entry_point, case.args, case.named) for case in cases]

    async def judge(number: int, _: Outcome, result: bytes) -> tuple[str, str]:
        if not result:
            return "RE", "no result: the program ended before the function returned"
        if len(result) > limits.output_bytes:
            return "OLE", "the result is too large"
        try:
            value = plain.decode(result)
        except plain.NotPlain as error:
            return "RE", f"the result is {error}"
        return (
            ("AC", "") if holds(cases[number], value) else ("WA", f"the assertion at line {cases[number].line} failed")
        )

    session = Session(jails, program, inputs, limits, harness=jails.call_harness, ahead=stop)
    return await grade_cases(session, "assert", judge, stop)


async def _grade_two_jails(jails: Jails, program: str, tests: AssertTests, limits: Limits) -> Verdict | None:
    """The verdict, or None if the tests need to share an interpreter with the program. Raises MachineFault."""
    whole = replace(limits, cpu_seconds=limits.program_cpu_seconds, wall_seconds=limits.program_cpu_seconds)
    whole = whole if limits.program_cpu_seconds < 5 * limits.cpu_seconds else _five_times(limits)
    patient = replace(
        whole, cpu_seconds=whole.cpu_seconds * TESTS_PATIENCE, wall_seconds=whole.wall * TESTS_PATIENCE + 5.0
    )
    async with contextlib.AsyncExitStack() as stack:
        solution = await _enter(stack, jails, whole)
        solution.load(program.encode("utf-8", "surrogatepass"), hints(program), jails.solution_harness, whole)
        problem = await solution.compiled()
        if problem:
            return Verdict("CE", 0, 1, detail=problem)
        tester = await _enter(stack, jails, patient)
        tester.load(tests.code.encode("utf-8", "surrogatepass"), hints(tests.code), jails.tests_harness, patient)
        problem = await tester.compiled()
        if problem:
            return Verdict("INFRA", 0, 0, detail=f"the tests do not compile: {problem}")
        did, tested, report = await _run_both(solution, tester, tests.entry_point)
        return _judge_report(did, tested, report, whole)


def _five_times(limits: Limits) -> Limits:
    return replace(limits, cpu_seconds=5 * limits.cpu_seconds, wall_seconds=2 * limits.wall)


async def _enter(stack: contextlib.AsyncExitStack, jails: Jails, limits: Limits) -> Jail:
    jail = await jails.take(limits)
    stack.callback(jails.release, jail)
    return jail


async def _run_both(solution: Jail, tester: Jail, entry_point: str) -> tuple[Outcome, Outcome, bytes]:
    files = [
        [memory_file(b""), os.memfd_create("out", os.MFD_CLOEXEC), os.memfd_create("result", os.MFD_CLOEXEC)],
        [
            memory_file(marshal.dumps((entry_point, None), 2)),
            os.memfd_create("out", os.MFD_CLOEXEC),
            os.memfd_create("result", os.MFD_CLOEXEC),
        ],
    ]
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with one, other:
            numbers = (solution.submit([*files[0], one.fileno()]), tester.submit([*files[1], other.fileno()]))
        done = await asyncio.gather(
            solution.result(numbers[0], files[0][1]),
            tester.result(numbers[1], files[1][1]),
            return_exceptions=True,
        )
        for result in done:
            if isinstance(result, BaseException):
                raise result
        did, tested = done
        assert isinstance(did, Outcome)
        assert isinstance(tested, Outcome)
        return did, tested, os.pread(files[1][2], 1 << 20, 0)
    finally:
        close_files([*files[0], *files[1]])


def _judge_report(did: Outcome, tested: Outcome, data: bytes, limits: Limits) -> Verdict | None:
    """None: the tests need to share an interpreter."""
    try:
        report = plain.decode(data)
    except plain.NotPlain:
        return Verdict("INFRA", 0, 0, detail=f"the tests left no report: {fate(tested, limits)[1]}")
    ended_well = fate(tested, limits)[0] in ("AC", "OLE")
    if report["share"] and ended_well:
        return None
    if not report["calls"] and not ended_well:
        return Verdict("INFRA", 0, 0, detail=f"the tests failed by themselves: {fate(tested, limits)[1]}")
    if report["broken"]:
        return Verdict("INFRA", 0, 0, detail=f"the tests are broken: {report['broken']}")
    units = report["units"]
    total = max(1, len(units) + (0 if report["ended"] and not report["gone"] else 1))
    tally = Tally("assert", total, limits, True)
    passed = sum(1 for _, good, _ in units if good)
    verdict, detail = fate(did, limits)
    failed = next(((name, text) for name, good, text in units if not good), None)
    if verdict == "AC" and (report["gone"] or not report["ended"]):
        verdict, detail = "RE", f"the program ended while the tests ran ({report['gone'] or 'tests stopped'})"
    elif verdict == "AC" and failed is not None:
        verdict, detail = "WA", f"{failed[0]}: {failed[1]}"
    elif verdict == "AC" and (report["calls"] == 0 or not units):
        return Verdict("INFRA", 0, 0, detail="the tests never call the program")
    tally.add(did, verdict, detail)
    return replace(tally.verdict(), passed=passed if verdict != "AC" else total, total=total)


async def _grade_shared(jails: Jails, program: str, tests: AssertTests, limits: Limits) -> Verdict:
    """Tests and program in one interpreter: whatever this says, the program could have said itself."""
    whole = _five_times(limits)
    given = marshal.dumps((tests.entry_point, program.encode("utf-8", "surrogatepass")), 2)
    session = Session(jails, tests.code, [given], whole, harness=jails.tests_harness, ahead=False)

    async def judge(_: int, outcome: Outcome, result: bytes) -> tuple[str, str]:
        try:
            report = plain.decode(result)
            units = report["units"]
            failed = next(((name, text) for name, good, text in units if not good), None)
            if failed is not None:
                return "WA", f"{failed[0]}: {failed[1]}"
            if report["gone"] or not report["ended"] or not units:
                return "RE", "the program ended while the tests ran"
        except (plain.NotPlain, KeyError, TypeError, ValueError):
            return "RE", "no report: the program ended before the tests did"
        return "AC", ""

    return replace(await grade_cases(session, "assert, shared interpreter", judge, True), soft=True)
