"""The capability table, and what it is read for."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import time
from pathlib import Path

import pytest

from sandbox import SandboxError, cgroup, policy, selftest
from sandbox.inside import runner
from sandbox.policy import allowed, bpf, numbers
from sandbox.selftest import PROTECTIONS, require, smokes
from sandbox.types import Capability, CapabilityTable, Limits
from sandbox.watch import Observer, scheduled, tree, used_by


def test_every_protection_holds_here() -> None:
    table = selftest()
    assert [row.name for row in table.rows] == list(PROTECTIONS)
    assert [row for row in table.rows if not row.ok] == []
    assert table.memory_backend.startswith("cgroup")
    assert table.missing(("network", "memory_tree")) == ()


def test_without_cgroups_the_table_says_what_is_missing() -> None:
    table = selftest(use_cgroups=False)
    assert table.memory_backend == "rlimits"
    assert [row.name for row in table.rows if not row.ok] == ["memory_tree"]
    with pytest.raises(SandboxError, match="memory_tree"):
        require(("memory_tree",), "/usr/bin/python3", use_cgroups=False)


def test_where_jails_do_not_start_nothing_holds() -> None:
    table = selftest("/nonexistent/python")
    assert not any(row.ok for row in table.rows)
    assert "does not run" in table.rows[0].detail


def test_it_may_be_called_where_a_loop_runs() -> None:
    async def inside() -> CapabilityTable:
        return selftest("/nonexistent/python")

    assert asyncio.run(inside()).rows


def test_a_name_that_no_protection_has() -> None:
    with pytest.raises(SandboxError, match="networks"):
        CapabilityTable((Capability("network", True, ""),)).missing(("networks",))


def test_the_four_smokes() -> None:
    rows = smokes()
    assert [(row.name, row.verdict, row.ok) for row in rows] == [
        ("passing", "AC", True),
        ("failing", "WA", True),
        ("timeout", "TLE", True),
        ("blocked network", "AC", True),
    ]


def run_filter(program: bytes, number: int, argument: int = 0, arch: int = 0xC000003E) -> int:
    """What the kernel would answer: the few instructions of classic BPF that the filter uses, in Python."""
    data = {0: number, 4: arch, 16: argument & 0xFFFFFFFF}
    place = accumulator = 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, place * 8)
        place += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            accumulator = data[value]
        else:
            tests = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
            tests[0x45] = bool(accumulator & value)
            place += yes if tests[code] else no


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_filter_says_what_the_tables_say(shared_memory: bool) -> None:
    program = bpf(shared_memory=shared_memory)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096
    allow, deny = set(allowed(shared_memory=shared_memory).values()), set(numbers(policy._EPERM).values())
    for number in set(range(600)) - {policy._CLONE, policy._SOCKET, policy._SOCKETPAIR, policy._PRLIMIT}:
        wanted = 0x7FFF0000 if number in allow else 0x50001 if number in deny else 0x50026
        assert run_filter(program, number) == wanted, number


@pytest.mark.parametrize(
    ("number", "argument", "good"),
    [
        (policy._CLONE, 0x003D0F00, True),  # a thread
        (policy._CLONE, 17, True),  # fork
        *[(policy._CLONE, 1 << bit | 17, False) for bit in (17, 25, 26, 27, 28, 29, 30)],
        *[(policy._SOCKET, family, family in (1, 2, 10)) for family in range(50)],
        *[(policy._SOCKETPAIR, family, family == 1) for family in range(50)],
        *[(policy._PRLIMIT, pid, pid == 0) for pid in (0, 1, 2, 0xFFFFFFFF)],
    ],
)
def test_the_filter_looks_at_arguments(number: int, argument: int, good: bool) -> None:
    assert run_filter(bpf(shared_memory=True), number, argument) == (0x7FFF0000 if good else 0x50001)


def test_the_filter_knows_other_ways_in() -> None:
    program = bpf(shared_memory=True)
    assert run_filter(program, 39, arch=0x40000003) == 0x80000000  # i386
    assert run_filter(program, 0x40000000 | 39) == 0x50026  # x32


def test_no_call_is_both_allowed_and_denied() -> None:
    table = allowed(shared_memory=True)
    denied = numbers(policy._EPERM)
    assert not set(table.values()) & set(denied.values())
    assert not {policy._CLONE, policy._SOCKET, policy._SOCKETPAIR, policy._PRLIMIT} & set(table.values())


def test_a_group_bounds_and_counts(tmp_path: Path) -> None:
    hierarchy, _ = cgroup.find_hierarchy()
    assert hierarchy is not None
    group = cgroup.make_group(hierarchy, f"{cgroup.PREFIX}{os.getpid()}-test")
    try:
        for size in (64, 128, 32):
            cgroup.set_limit(group, size)
            file = "memory.limit_in_bytes" if hierarchy.version == 1 else "memory.max"
            assert int((group.folder / file).read_text()) == size << 20
        child = subprocess.Popen(["sleep", "60"])
        cgroup.admit(group, child.pid)
        assert (group.folder / "cgroup.procs").read_text().split() == [str(child.pid)]
        assert not cgroup.oomed(group)
        child.kill()
        child.wait()
    finally:
        cgroup.remove_group(group)
    assert not group.folder.exists()


def test_why_there_are_no_groups_is_said(tmp_path: Path) -> None:
    assert cgroup.find_hierarchy(tmp_path) == (None, f"no cgroup file system at {tmp_path}")


def test_groups_of_dead_pools_are_swept() -> None:
    hierarchy, _ = cgroup.find_hierarchy()
    assert hierarchy is not None
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = hierarchy.memory / f"{cgroup.PREFIX}{gone.pid}-1-0"
    stale.mkdir()
    assert cgroup.sweep(hierarchy) >= 1
    assert not stale.exists()


@pytest.fixture
def family() -> subprocess.Popen[bytes]:
    """A shell with a child that sleeps; ended by the test."""
    return subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)


def test_a_sleeping_tree_is_asleep_and_a_busy_one_is_not(family: subprocess.Popen[bytes]) -> None:
    try:
        end = time.monotonic() + 20
        while not tree(family.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert len(tree(family.pid)) == 1
        assert sum(scheduled(family.pid)) < 5
        assert used_by(family.pid) < 5
        limits = Limits(cpu_seconds=1.0, wall_seconds=2.0)
        assert Observer(family.pid, 0.0, limits).judge(1.0, 0.1) == runner.ALIVE
        assert Observer(family.pid, 0.0, limits).judge(20.0, 0.1) == runner.WALL
        assert Observer(family.pid, 0.0, limits).judge(1.0, 1.1) == runner.HOST_CPU
        assert Observer(family.pid, 0.0, limits, busiest=15.0).judge(20.0, 0.1) == runner.ALIVE
        assert Observer(family.pid, 0.0, limits, busiest=15.0).judge(60.0, 0.1) == runner.WALL
        assert Observer(family.pid, 0.0, limits, busiest=50.0).judge(60.0, 0.1) == runner.STARVED
    finally:
        os.killpg(family.pid, 9)
        family.wait()
