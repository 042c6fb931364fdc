"""A bound on the memory of a jail's whole process tree, by cgroup v1 or v2, where they can be written.

A pool keeps one group for each jail that it may have at once and uses them again: making and removing a
memory group costs more than running a program. The host moves a jail's pid 1 into the group before it hands
over any program, so all that the program ever starts is inside.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "rlvr-jails-"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where memory groups can be made, under cgroup version 1 or 2."""

    version: int
    memory: Path


@dataclass(slots=True)
class Group:
    """One jail's group. The control files stay open: each program reads and writes several of them."""

    version: int
    folder: Path
    procs: int
    events: int
    limit_files: list[int]  # memory first, then swap
    limit_mb: int = 0
    kills_before: int = 0  # OOM kills when the present jail moved in


def find_hierarchy(root: Path = ROOT) -> tuple[Hierarchy | None, str]:
    """Where this process can make memory groups, or None and the reason."""
    v1 = root / "memory"
    if (v1 / "memory.limit_in_bytes").exists() or (v1 / "cgroup.procs").exists():
        if os.access(v1, os.W_OK):
            return Hierarchy(1, v1), "cgroup v1"
        return None, f"cgroup v1 is there, but {v1} cannot be written"
    own = _own_v2_folder(root)
    if own is None:
        return None, f"no cgroup file system at {root}"
    if not os.access(own, os.W_OK):
        return None, f"cgroup v2: {own} cannot be written; delegate it to this user"
    controllers = (own / "cgroup.controllers").read_text().split()
    if "memory" not in controllers:
        return None, f"cgroup v2: {own} has no memory controller (it has: {' '.join(controllers) or 'none'})"
    try:
        (own / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError as error:
        return None, f"cgroup v2: {own} cannot pass its memory controller on: {error.strerror}"
    return Hierarchy(2, own), "cgroup v2"


def _own_v2_folder(root: Path) -> Path | None:
    if not (root / "cgroup.controllers").exists():
        return None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return root / line[3:].lstrip("/")
    return None


def make_group(hierarchy: Hierarchy, name: str) -> Group:
    """Create a group called `name`. Raises OSError."""
    folder = hierarchy.memory / name
    folder.mkdir(exist_ok=True)
    if hierarchy.version == 1:
        events, limits = "memory.oom_control", ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    else:
        events, limits = "memory.events", ["memory.max", "memory.swap.max"]
    limits = [name for name in limits if (folder / name).exists()]
    return Group(
        hierarchy.version,
        folder,
        procs=os.open(folder / "cgroup.procs", os.O_RDWR | os.O_CLOEXEC),
        events=os.open(folder / events, os.O_RDONLY | os.O_CLOEXEC),
        limit_files=[os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC) for name in limits],
    )


def admit(group: Group, pid: int) -> None:
    """Move a process in. May sleep for some milliseconds in the kernel. Raises OSError if it has gone."""
    os.pwrite(group.procs, str(pid).encode(), 0)
    group.kills_before = oom_kills(group)


def set_limit(group: Group, memory_mb: int) -> None:
    """Bound the group's memory, in MiB, with no swap beyond it. Raises OSError."""
    if memory_mb == group.limit_mb:
        return
    size = memory_mb << 20
    # Memory, then swap; under version 1 the second is memory and swap together. A kernel may lack the second.
    values = [size, 0 if group.version == 2 else size]
    writes = list(zip(group.limit_files, values, strict=False))
    if group.version == 1 and memory_mb > group.limit_mb > 0:
        writes.reverse()  # memory and swap together may never be below memory
    for descriptor, value in writes:
        os.pwrite(descriptor, str(value).encode(), 0)
    group.limit_mb = memory_mb


def oom_kills(group: Group) -> int:
    """How many processes of this group the kernel has killed for want of memory, ever."""
    text = os.pread(group.events, 4096, 0)
    place = text.find(b"oom_kill ")
    return int(text[place + 9 :].split(None, 1)[0]) if place >= 0 else 0


def oomed(group: Group) -> bool:
    """Whether the present jail has lost a process for want of memory."""
    return oom_kills(group) > group.kills_before


def remove_group(group: Group) -> None:
    """Remove an empty group. Raises OSError if something still runs in it."""
    for descriptor in (group.procs, group.events, *group.limit_files):
        os.close(descriptor)
    group.folder.rmdir()


def sweep(hierarchy: Hierarchy) -> int:
    """Remove empty groups of pools whose process is gone; how many. Those still in use stay."""
    removed = 0
    for folder in hierarchy.memory.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(OSError):  # busy: its own janitor is still at work
                folder.rmdir()
                removed += 1
    return removed
