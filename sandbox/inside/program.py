"""Runs in a case's process: becomes the case, executes the program, ends as CPython ends."""

from __future__ import annotations

import _signal
import atexit
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox.inside.runner import OTHERS


def child(
    program: Any,
    harness: Any,
    descriptors: list[int],
    err_write: int,
    cpu_limit: float,
    processes: int,
    file_size: int,
    address_mb: int,
) -> None:
    """Become the case: own descriptors and limits only, then the program. Never returns."""
    import resource

    leave = os._exit
    try:
        os.dup2(descriptors[0], 0)
        os.dup2(descriptors[1], 1)
        os.dup2(err_write, 2)
        # Copies first: 3 and above may be among the descriptors received.
        for place, copy in enumerate([os.dup(descriptor) for descriptor in descriptors[2:]]):
            os.dup2(copy, 3 + place)
        os.closerange(1 + len(descriptors), 1 << 20)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # signal.signal takes 0.2 ms over an enum
        seconds = int(cpu_limit) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        resource.setrlimit(resource.RLIMIT_NPROC, (processes + OTHERS, processes + OTHERS))
        if address_mb:
            size = address_mb << 20
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        sys.argv = ["solution.py"]
        if harness is not None:
            namespace = {**globals(), "__name__": "harness", "program": program}
            exec(harness, namespace)
            namespace["main"]()
            leave(70)
        main = new_main("__main__")
        finish(main, run_program(program, main), PRIVATE)
    finally:
        leave(70)  # whatever the program did to this frame: it never goes on as the runner


def new_main(name: str) -> dict[str, Any]:
    """The namespace of a fresh module, as a script's or as an imported solution's; the runner's own is dropped."""
    sys.modules["__main__"] = type(sys)("__main__")
    module = type(sys)(name)
    module.__dict__.update(__file__="/tmp/solution.py", __builtins__=sys.modules["builtins"])
    sys.modules[name] = module
    return module.__dict__


def run_program(program: Any, namespace: dict[str, Any]) -> int:
    """Execute it as CPython would; the exit code."""
    try:
        exec(program, namespace)
    except SystemExit as request:
        return exit_code(request)
    except BaseException as error:
        report_error(error)
        return 1
    return 0


def exit_code(request: SystemExit) -> int:
    value = request.code
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    try:
        sys.stderr.write(f"{value}\n")
    except BaseException:  # stderr may be closed or replaced; the exit code says enough
        return 1
    return 1


def report_error(error: BaseException) -> None:
    """What CPython prints for an uncaught error, without the frame of ours that ran the program."""
    try:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # a hook that fails itself changes nothing
        return


def finish(namespace: dict[str, Any], code: int, own: dict[str, Any]) -> None:
    """End as CPython does: wait for threads, run atexit, flush, drop globals, flush. Never returns.

    `own` is `PRIVATE`: the program may have replaced any builtin or module attribute. Whatever happens here,
    the process ends with the exit code that CPython would give.
    """
    leave, modules, caught, system = own["leave"], own["modules"], own["caught"], own["system"]
    original, to_list = own["stdout"], own["list"]
    try:
        if "threading" in modules:
            modules["threading"]._shutdown()
    except caught:
        pass
    try:
        own["atexit"]()
    except caught:
        pass
    try:
        if system.stdout is not None and not own["getattr"](system.stdout, "closed", False):
            system.stdout.flush()
    except caught:
        code = code or 120
    try:
        # A file object that only a global or a cycle holds is flushed when the globals go.
        for name in to_list(namespace):
            if name != "__builtins__":
                namespace[name] = None
        own["collect"]()
        if not original.closed:
            original.flush()
        for stream in (system.stdout, system.stderr):
            if stream is not None and stream is not original:
                stream.flush()
    except caught:
        pass
    leave(code)


# What `finish` uses, taken before any program runs.
PRIVATE = {
    "leave": os._exit,
    "modules": sys.modules,
    "caught": BaseException,
    "system": sys,
    "stdout": sys.stdout,
    "list": list,
    "getattr": getattr,
    "atexit": atexit._run_exitfuncs,
    "collect": gc.collect,
}
