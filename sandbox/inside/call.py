"""Runs in a case's process: executes the program, calls its entry point, and writes the result to descriptor 3.

The host compiles plain.py, names.py and this file as one, and the runner executes it in a namespace that
has its own functions.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox.inside.names import execute, find_entry, solution_namespace
    from sandbox.inside.program import PRIVATE, finish, report_error
    from sandbox.inside.runner import read_file
    from sandbox.plain import encode

    program = compile("", "", "exec")


def main() -> None:
    import marshal

    entry_point, args, named = marshal.loads(read_file(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    write, truncate, to_stderr = os.pwrite, os.ftruncate, sys.stderr
    space = solution_namespace(program)
    code = execute(program, space)
    if code == 0:
        code = call(space, entry_point, args, named, write, truncate, to_stderr)
    finish(space, code, PRIVATE)


def call(space: Any, entry_point: str, args: Any, named: Any, write: Any, truncate: Any, to_stderr: Any) -> int:
    """Call and report; the exit code."""
    try:
        result = encode(find_entry(space, entry_point)(*args, **named))
        truncate(3, 0)
        write(3, result, 0)
    except SystemExit:
        to_stderr.write("the program exited instead of returning\n")
        return 1
    except BaseException as error:
        report_error(error)
        return 1
    return 0
