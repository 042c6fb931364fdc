"""One run a folder: a lock that ends with the process that holds it, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from engine.errors import InputError

LOCK = "lock"
"""The first file of a run's folder."""


class LockError(InputError):
    """The folder is another run's, or can't be locked."""


def lock_folder(folder: Path) -> IO[str]:
    """Lock an existing folder until the file is closed. Raises LockError with the pid of the run that has it."""
    try:
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise LockError(f"{folder}: can't be written: {error.strerror}; name another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        pid = file.read().strip()
        file.close()
        raise LockError(
            f"{folder}: the run with process id {pid or '?'} is writing it; wait for its end, stop it with "
            f"kill -INT {pid or 'PID'}, or name another folder"
        ) from None
    except OSError as error:
        file.close()
        raise LockError(f"{folder}: its file system has no locks ({error.strerror}); name another folder") from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
