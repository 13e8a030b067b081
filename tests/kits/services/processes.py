"""Lists the processes of this machine, and waits for processes that are not children of this
one."""

import os
import select
from pathlib import Path


def processes() -> dict[int, tuple[int, bytes]]:
    """Returns the parent and the command of each process of this machine."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # the process has exited
        found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1]), command
    return found


def descendants_of(pid: int) -> list[int]:
    """Returns the descendants of a process."""
    there = processes()
    found = [pid]
    for each in found:
        found += [i for i, (parent, _) in there.items() if parent == each]
    return found[1:]


def ended(pid: int, *, deadline_s: float = 30.0) -> bool:
    """Waits until a process has exited that is not a child of this process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], deadline_s)[0])
    finally:
        os.close(descriptor)
