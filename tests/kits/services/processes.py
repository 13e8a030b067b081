"""The processes of this machine, and the end of processes that are no children of this one."""

import os
import select
from pathlib import Path


def processes() -> dict[int, tuple[int, bytes]]:
    """The parent and the command of each process of this machine."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1]), command
    return found


def descendants_of(pid: int) -> list[int]:
    """The descendants of a process."""
    there = processes()
    found = [pid]
    for each in found:
        found += [i for i, (parent, _) in there.items() if parent == each]
    return found[1:]


def ended(pid: int, *, deadline_s: float = 30.0) -> bool:
    """Waits until a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], deadline_s)[0])
    finally:
        os.close(descriptor)
