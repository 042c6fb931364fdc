"""Pid 1 of an nsjail: a warm interpreter that never sees a program.

For each program it clones a process with fresh pid, mount, network and ipc namespaces, which mounts an empty
/tmp, gives up every capability, installs the program's own system call filter, and only then listens to the host.
Compiled together with runner.py, behind it, whose functions it uses.
"""

from __future__ import annotations

import os
import signal
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox.inside.runner import (
        CODE_FD,
        CONTROL_FD,
        FILTER_FD,
        PRELOAD,
        close_all,
        import_hints,
        prepare_shm,
        read_file,
        receive,
        serve,
        settle,
    )

NEW_NAMESPACES = 0x20000000 | 0x00020000 | 0x08000000 | 0x40000000  # pid, mount, ipc, network
SYS_CLONE = 56
SIGCHLD = 17
MS_NOSUID_NODEV = 2 | 4
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_CAP_AMBIENT = 4, 22, 23, 24, 47
CAPABILITIES = (8, 21)  # CAP_SETPCAP and CAP_SYS_ADMIN: nsjail has left the zygote no others


def zygote() -> None:
    """Answer the host until it closes the socket: a jail for each frame. Never returns."""
    import _socket
    import ctypes
    import resource  # noqa: F401  # so that cases need not
    import select

    import_hints(PRELOAD)
    site_builtins()
    compile(b"import a\ndef f(x): return [y for y in x if y]\n", "", "exec")  # the first one costs 2 ms more
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.PyDLL(None, use_errno=True)
    must(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    held = [number for number in range(64) if libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) == 1]
    if held != list(CAPABILITIES):
        raise OSError(f"the zygote has the capabilities {held}")
    prepare_shm(libc, ctypes)
    seccomp_filter = read_file(FILTER_FD)
    close_all([CODE_FD, FILTER_FD])
    control = _socket.socket(fileno=CONTROL_FD)
    control.send(b"Z")
    poller = select.poll()
    poller.register(CONTROL_FD, select.POLLIN)
    children: dict[int, int] = {}
    settle()
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in children:
                os.wait4(children.pop(descriptor), 0)
                poller.unregister(descriptor)
                os.close(descriptor)
                continue
            frame, descriptors = receive(control)
            if not frame:
                os._exit(0)
            pid = clone(ctypes, libc)
            if pid == 0:
                become_runner(ctypes, libc, descriptors[0], frame[1:], seccomp_filter)
            close_all(descriptors)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poller.register(pidfd, select.POLLIN)


def site_builtins() -> None:
    """`exit`, `quit` and `help`, which the site module would have set; programs end with exit() often."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()


def must(result: int, what: str) -> None:
    """Raise OSError if a C call failed: a jail that lacks a protection must not start."""
    if result != 0:
        import ctypes

        raise OSError(ctypes.get_errno(), what)


def clone(ctypes: Any, libc: Any) -> int:
    """fork() into new namespaces. CPython's own hooks around it keep its locks and thread state right."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(SYS_CLONE, NEW_NAMESPACES | SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, "clone")
    return pid


def become_runner(ctypes: Any, libc: Any, control: int, mount_options: bytes, seccomp_filter: bytes) -> None:
    """Finish the jail, then serve one program. Never returns; a step that fails ends the jail, which the host sees."""
    try:
        os.dup2(control, CONTROL_FD)
        os.closerange(CONTROL_FD + 1, 1 << 20)
        must(libc.mount(b"none", b"/tmp", b"tmpfs", MS_NOSUID_NODEV, mount_options), "mount")
        os.chdir("/tmp")
        os.setsid()  # a process group reaches across namespaces: kill(0, 9) would find the zygote's other children
        must(libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0), "clear ambient capabilities")
        for capability in CAPABILITIES:
            must(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "drop a capability")
        header = ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0), 8)
        must(libc.capset(header, ctypes.create_string_buffer(24)), "capset")
        code = ctypes.create_string_buffer(seccomp_filter, len(seccomp_filter))
        program = struct.pack("@HP", len(seccomp_filter) // 8, ctypes.addressof(code))
        must(libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(program, len(program)), 0, 0), "seccomp")
        must(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        import _socket

        serve(_socket.socket(fileno=CONTROL_FD))
    finally:
        os._exit(71)


if __name__ == "__main__":
    zygote()
