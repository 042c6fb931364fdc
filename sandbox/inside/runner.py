"""Pid 1 of a jail: forks one process for each case and tells the host what the kernel says about it.

Started by zygote.py, which is compiled together with it and makes the jail around it.

Runs inside the jail, with the standard library only; the host imports it for the frames' layout. It never
holds an expected output, and inputs and outputs pass it by as open memory files, so that nothing of one case
can be found in the memory of the next.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import struct
import time

TYPE_CHECKING = False  # typing costs a spare 10 ms
if TYPE_CHECKING:
    from typing import Any

    from sandbox.inside.program import child

# Host to runner, with file descriptors beside it. P: mode, then text. R: run a case. K: kill it, for a reason.
PROGRAM = struct.Struct("<c")  # descriptors: source, harness (if any); text: modules to import, by comma
RUN = struct.Struct("<cIddIQI")  # seq, CPU limit, tick (s), processes, file size, MiB; descriptors: in, out, others
KILL = struct.Struct("<cIB")  # seq, reason
# Runner to host. H: ready. C: compiled or not, then why. T: still running. D: done, then stderr's tail.
COMPILED = struct.Struct("<c?")
TICK = struct.Struct("<cIdd")  # seq, wall, CPU of the case's first process
DONE = struct.Struct("<cIiB?dddQ")  # seq, wait status, reason killed, dirty, CPU, CPU of its tree, wall, KiB
MAX_FRAME = 16384
STDERR_TAIL = 4096
OTHERS = 5  # processes of the jail's uid that are not the case's: the zygote, this runner, spares

ALIVE, CPU, HOST_CPU, WALL, STARVED, MEMORY = range(6)  # reasons

CONTROL_FD = 3
CODE_FD = 4
FILTER_FD = 5
TMP = "/tmp"


def serve(control: Any) -> None:
    """Answer the host until it closes the socket. Never returns."""
    settle()
    control.send(b"H")
    program: Any = None
    harness: Any = None
    queue: list[tuple[bytes, list[int]]] = []  # cases that came while another ran
    while True:
        frame, descriptors = queue.pop(0) if queue else receive(control)
        kind = frame[:1]
        if not frame:
            os._exit(0)
        if kind == b"P":
            program, harness = None, None
            try:
                import_hints(frame[1:].decode())
                program = compile(read_file(descriptors[0]), "/tmp/solution.py", "exec", dont_inherit=True)
            except BaseException as error:  # compile may raise nearly anything; all of it is the program's fault
                reason = describe(error).encode("utf-8", "replace")[:2000]
                control.send(COMPILED.pack(b"C", False) + reason)
            else:
                if len(descriptors) > 1:
                    import marshal

                    harness = marshal.loads(read_file(descriptors[1]))
                control.send(COMPILED.pack(b"C", True))
            close_all(descriptors)
            settle()
        elif kind == b"R" and program is not None:
            if not run_case(control, program, harness, frame, descriptors, queue):
                program = None  # /tmp is not clean: the host drops this jail, and no other case may see it
        else:
            close_all(descriptors)


def prepare_shm(libc: Any, ctypes: Any) -> None:
    """Remember what `wipe` needs, before any program is here."""
    global shmctl, shm_info, shm_stat
    shmctl, shm_info, shm_stat = (
        libc.shmctl,
        ctypes.create_string_buffer(64),
        ctypes.create_string_buffer(128),
    )


def settle() -> None:
    """Keep the collector off what is here now, so that a fork copies few pages."""
    gc.collect()
    gc.freeze()


def receive(control: Any) -> tuple[bytes, list[int]]:
    """One frame and its descriptors; an empty frame means that the host is gone."""
    frame, ancillary, _, _ = control.recvmsg(MAX_FRAME, 128)
    descriptors: list[int] = []
    for _, _, data in ancillary:
        descriptors += struct.unpack(f"{len(data) // 4}i", data)
    return frame, descriptors


def read_file(descriptor: int) -> bytes:
    """The whole of a memory file, whatever its offset."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0)


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def import_hints(names: str) -> None:
    """Import what the program is going to import, once instead of once a case. The host sends known names only."""
    for name in names.split(","):
        if name:
            with contextlib.suppress(ImportError):  # the program will see the same error itself
                __import__(name)


def describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    return f"{type(error).__name__}: {error}"


def run_case(
    control: Any,
    program: Any,
    harness: Any,
    frame: bytes,
    descriptors: list[int],
    queue: list[tuple[bytes, list[int]]],
) -> bool:
    """Fork, watch, kill, reap, wipe, report. Whether nothing of the case is left."""
    _, seq, cpu_limit, tick, processes, file_size, address_mb = RUN.unpack(frame)
    err_read, err_write = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child(program, harness, descriptors, err_write, cpu_limit, processes, file_size, address_mb)
    os.close(err_write)
    close_all(descriptors)
    reason, tail, gone = watch(control, pid, seq, err_read, start, cpu_limit, tick, queue)
    if reason != ALIVE or gone:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    cpu = usage.ru_utime + usage.ru_stime
    wall = time.monotonic() - start
    tree = cpu + reap_rest()
    if gone:
        os._exit(0)
    tail = drain(err_read, tail)
    os.close(err_read)
    dirty = not wipe()
    report = DONE.pack(b"D", seq, status, reason, dirty, cpu, tree, wall, usage.ru_maxrss)
    control.send(report + tail[-STDERR_TAIL:])
    return not dirty


def watch(
    control: Any,
    pid: int,
    seq: int,
    err_read: int,
    start: float,
    cpu_limit: float,
    tick: float,
    queue: list[tuple[bytes, list[int]]],
) -> tuple[int, bytes, bool]:
    """Wait for the case's first process to end, to use up its CPU time, or to be killed by the host.

    Returns why it must be killed (ALIVE: it ended), the end of its stderr, and whether the host is gone.
    """
    import select

    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    for descriptor in (pidfd, err_read, CONTROL_FD):
        poller.register(descriptor, select.POLLIN)
    clock = (~pid << 3) | 2  # the CPU clock of another process, see clock_getcpuclockid(3)
    tail = b""
    next_tick = start + tick
    wait = min(cpu_limit, tick, 0.1)
    try:
        while True:
            events = dict(poller.poll(wait * 1000 + 1))
            if pidfd in events:
                return ALIVE, tail, False
            if CONTROL_FD in events:
                frame, descriptors = receive(control)
                if not frame:
                    return ALIVE, tail, True
                if frame[:1] == b"R":
                    queue.append((frame, descriptors))
                if frame[:1] == b"K" and KILL.unpack(frame)[1] == seq:
                    return KILL.unpack(frame)[2], tail, False
            if err_read in events:
                piece = os.read(err_read, 65536)
                tail = (tail + piece)[-STDERR_TAIL:]
                if not piece:  # every holder closed it
                    poller.unregister(err_read)
            now = time.monotonic()
            used = time.clock_gettime(clock)
            if used >= cpu_limit:
                return CPU, tail, False
            if now >= next_tick:
                next_tick = now + tick
                send_tick(control, seq, now - start, used)
            wait = max(0.001, min(cpu_limit - used, next_tick - now, 0.1))
    finally:
        os.close(pidfd)


def send_tick(control: Any, seq: int, wall: float, used: float) -> None:
    with contextlib.suppress(BlockingIOError):  # the host is busy; the next tick tells it the same
        control.send(TICK.pack(b"T", seq, wall, used), 0x40)  # MSG_DONTWAIT


def reap_rest() -> float:
    """Kill and reap all that the case left behind; the CPU seconds that it used."""
    used = 0.0
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            _, _, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return used
        used += usage.ru_utime + usage.ru_stime


def drain(descriptor: int, tail: bytes) -> bytes:
    """What is left in the stderr pipe, now that no process of the case lives.

    Never waits for the end of file: a case can leave the other end in flight, in a socket that holds itself.
    """
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(descriptor, 65536):
            tail = (tail + piece)[-STDERR_TAIL:]
    return tail


def wipe() -> bool:
    """Empty /tmp and drop shared memory segments; False if something could not be removed."""
    global tmp_changed
    clean = segments() == 0 or remove_segments()
    # A folder's ctime cannot be set back: where it is the old one, nothing was made, removed or chmodded.
    if os.stat(TMP).st_ctime_ns != tmp_changed:
        os.chmod(TMP, 0o1777)
        clean = remove_tree(TMP) and not os.listdir(TMP) and clean
        os.utime(TMP, (0, 0))
        tmp_changed = os.stat(TMP).st_ctime_ns
    return clean


def segments() -> int:
    """How many System V shared memory segments there are."""
    shmctl(0, 14, shm_info)  # SHM_INFO
    return int(struct.unpack_from("i", shm_info)[0])


def remove_segments() -> bool:
    last = shmctl(0, 14, shm_info)
    for index in range(last + 1):
        ident = shmctl(index, 13, shm_stat)  # SHM_STAT: from an index to an id
        if ident >= 0:
            shmctl(ident, 0, None)  # IPC_RMID
    return segments() == 0


def remove_tree(folder: str) -> bool:
    """Remove what is in `folder`, without recursion; False if some of it resists, a path too long for instance."""
    folders = [folder]
    try:
        for current in folders:
            os.chmod(current, 0o1777 if current == folder else 0o700)
            for entry in list(os.scandir(current)):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    os.unlink(entry.path)
        for current in reversed(folders[1:]):
            os.rmdir(current)
    except OSError:
        return False
    return True


PRELOAD = globals().get("PRELOAD", "")  # the command line sets it
tmp_changed = 0
shmctl: Any = None
shm_info: Any = None
shm_stat: Any = None
