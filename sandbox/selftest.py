"""Proves each protection on this machine by running a program that tries to break it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from sandbox.types import Capability, CapabilityTable, Limits, SandboxError, StdinCase, StdinTests, Verdict

T = TypeVar("T")

# Each program prints `held`, or what it got hold of.
_NETWORK = """
import socket
got = []
addresses = (2, ("127.0.0.1", 22)), (2, ("8.8.8.8", 53)), (2, ("169.254.169.254", 80)), (10, ("::1", 22))
for family, address in addresses:
    try:
        s = socket.socket(family)
        s.settimeout(1)
        s.connect(address)
        got.append(address)
    except OSError as error:
        if error.errno not in (101, 99, 97):
            got.append(error)
for family in (16, 17, 38, 40):
    try:
        socket.socket(family, 3 if family in (16, 17) else 1)
        got.append(family)
    except OSError:
        pass
print(got or "held")
"""
_FILES = """
import os
got = []
for path in ("/etc/passwd", "/etc/shadow", "/root", "/home", "/proc/self", "/proc/1", "/sys", "/var", "/usr/bin/sh",
             "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/mem", "/run"):
    if os.path.lexists(path):
        got.append(path)
print(got or "held")
"""
_WRITE = """
import os, sys
got = []
exe = os.path.realpath(sys.executable)
for folder in ("/", "/usr", "/usr/lib", "/dev", os.path.dirname(os.__file__), os.path.dirname(exe)):
    try:
        open(folder + "/mark", "w")
        got.append(folder)
    except OSError:
        pass
try:
    open(os.__file__, "a")
    got.append(os.__file__)
except OSError:
    pass
print(got or "held")
"""
_FORK_CAP = """
import os, time
n = 0
try:
    while n < 300:
        if os.fork() == 0:
            time.sleep(30)
        n += 1
except OSError:
    pass
print("held" if n < 40 else f"{n} forks")
"""
_MEMORY = "x = [0]\nwhile True:\n    x = x + x\n"
_MEMORY_TREE = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        for i in range(0, len(x), 4096):
            x[i] = 1
        time.sleep(30)
for _ in range(8):
    os.wait()
print("480 MiB in 8 processes under a limit of 128 MiB")
"""
_ORPHAN = """
import os, time
if input() == "1":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    os.wait()
    open("/tmp/mark", "w").write("x")
    print("held")
else:
    try:
        os.kill(-1, 0)
        print("a process of the last case lives")
    except ProcessLookupError:
        print("held" if not os.listdir("/tmp") else os.listdir("/tmp"))
"""
_FLOOD = "import sys\nwhile True:\n    sys.stdout.write('y' * 65536)\n"
_DESCRIPTORS = """
import os
got = []
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        got.append(fd)
    except OSError:
        pass
print(got or "held")
"""
_ENVIRONMENT = """
import os
allowed = {"PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH", "LC_CTYPE"}
print(sorted(set(os.environ) - allowed) or "held")
"""
_CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = dict(
    ptrace=(101, 16, 1), unshare=(272, 0x10000000), mount=(165, 0, 0, 0, 0, 0), setns=(308, 0, 0),
    bpf=(321, 0, 0, 0), io_uring_setup=(425, 8, 0), keyctl=(250, 0, 0), userfaultfd=(323, 0),
    clone3=(435, 0, 0), setuid=(105, 0), prlimit_of_init=(302, 1, 0, 0, 0), chroot=(161, 0),
    process_vm_readv=(310, 1, 0, 0, 0, 0, 0), pidfd_getfd=(438, 0, 0, 0), personality=(135, 0x0040000),
    perf_event_open=(298, 0, 0, 0, 0, 0), open_by_handle_at=(304, 0, 0, 0),
)
got = []
for name, numbers in calls.items():
    ctypes.set_errno(0)
    if libc.syscall(*map(ctypes.c_long, numbers)) >= 0 or ctypes.get_errno() not in (1, 38):
        got.append(name)
print(got or "held")
"""
_CPU = "while True:\n    pass\n"
_ROOT = """
import os
try:
    os.setuid(0)
    print("setuid(0) worked")
except OSError:
    print("held" if os.getuid() else "uid 0")
"""


@dataclass(frozen=True, slots=True)
class _Probe:
    name: str
    program: str
    inputs: tuple[str, ...] = ("",)
    verdict: str = "AC"
    expected: str = "held\n"


_PROBES = (
    _Probe("network", _NETWORK),
    _Probe("files", _FILES),
    _Probe("read_only", _WRITE),
    _Probe("fork_cap", _FORK_CAP),
    _Probe("memory_cap", _MEMORY, verdict="MLE"),
    _Probe("memory_tree", _MEMORY_TREE, verdict="MLE"),
    _Probe("orphan", _ORPHAN, inputs=("1\n", "2\n")),
    _Probe("output_flood", _FLOOD, verdict="OLE"),
    _Probe("descriptors", _DESCRIPTORS),
    _Probe("environment", _ENVIRONMENT),
    _Probe("system_calls", _CALLS),
    _Probe("no_root", _ROOT),
    _Probe("cpu_limit", _CPU, verdict="TLE"),
)
PROTECTIONS = tuple(probe.name for probe in _PROBES)
_LIMITS = Limits(cpu_seconds=0.5, memory_mb=128, wall_seconds=5.0)


@dataclass(frozen=True, slots=True)
class Smoke:
    """One of the four smokes: what it must give, what it gave, and in how many seconds of wall time."""

    name: str
    expected: str
    verdict: str
    ok: bool
    seconds: float
    detail: str


_INC = StdinTests((StdinCase("1\n", "2\n"), StdinCase("41\n", "42\n")))
_SMOKES = (
    ("passing", "print(int(input()) + 1)\n", _INC, "AC"),
    ("failing", "print(int(input()) - 1)\n", _INC, "WA"),
    ("timeout", _CPU, _INC, "TLE"),
    ("blocked network", _NETWORK, StdinTests((StdinCase("", "held\n"),)), "AC"),
)


@functools.cache
def selftest(python: str = "/usr/bin/python3", *, numpy: bool = False, use_cgroups: bool = True) -> CapabilityTable:
    """Try to break each protection. A machine where jails do not start has a table with no row that is ok.

    Done once in a process, which takes some seconds; may be called in any thread, one with a running event loop too.
    """
    return _run(_selftest(python, numpy, use_cgroups))


def smokes(python: str = "/usr/bin/python3") -> tuple[Smoke, ...]:
    """A passing, a failing, a slow program, and one that wants the network. Raises SandboxError."""
    return _run(_smokes(python))


def require(names: tuple[str, ...], python: str, *, numpy: bool = False, use_cgroups: bool = True) -> CapabilityTable:
    """The capability table, if every protection named holds. Raises SandboxError naming those that do not."""
    CapabilityTable(tuple(Capability(name, True, "") for name in PROTECTIONS)).missing(names)
    table = selftest(python, numpy=numpy, use_cgroups=use_cgroups)
    missing = table.missing(names)
    if missing:
        said = "; ".join(f"{row.name}: {row.detail}" for row in missing)
        raise SandboxError(f"protections that the recipe requires are missing here: {said}")
    return table


def _run(work: Coroutine[Any, Any, T]) -> T:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, work).result()


async def _selftest(python: str, numpy: bool, use_cgroups: bool) -> CapabilityTable:
    from sandbox.pool import Pool

    try:
        async with Pool(1, python=python, numpy=numpy, use_cgroups=use_cgroups) as pool:
            rows = [await _probe(pool, probe) for probe in _PROBES]
            return CapabilityTable(tuple(rows), python, pool.nsjail, pool.memory_backend)
    except SandboxError as error:
        return CapabilityTable(tuple(Capability(name, False, str(error)) for name in PROTECTIONS), python)


async def _probe(pool: Any, probe: _Probe) -> Capability:
    tests = StdinTests(tuple(StdinCase(given, probe.expected) for given in probe.inputs))
    verdict: Verdict = await pool.grade(probe.program, tests, _LIMITS)
    ok = verdict.verdict == probe.verdict
    detail = "held" if ok else f"{verdict.verdict} instead of {probe.verdict}: {verdict.detail}"
    return Capability(probe.name, ok, detail)


async def _smokes(python: str) -> tuple[Smoke, ...]:
    from sandbox.pool import Pool

    rows = []
    async with Pool(1, python=python) as pool:
        for name, program, tests, expected in _SMOKES:
            start = time.monotonic()
            verdict = await pool.grade(program, tests, Limits(cpu_seconds=1.0))
            seconds = time.monotonic() - start
            ok = verdict.verdict == expected
            rows.append(Smoke(name, expected, verdict.verdict, ok, seconds, verdict.detail))
    return tuple(rows)
