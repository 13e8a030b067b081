"""Ends this process at once: `end` after its services are closed, `leave` with its descendants.

`sys.exit` waits for threads that load or fetch a model, which may take minutes. Then it frees all
modules and objects, which takes a second if torch or Ray is loaded. `os._exit` waits for nothing,
but does not stop a compiler that such a thread has started.
"""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

MAX_ROUNDS = 20  # repeated, since a process may fork just before it is killed


def leave(*_: object) -> NoReturn:
    """Signal handler: kills all descendants of this process and ends it with status 0."""
    kill_descendants()
    os._exit(0)


def end(status: int) -> NoReturn:
    """Ends this process once its services are closed. Runs the functions registered with atexit."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
    os._exit(status)


def kill_descendants() -> None:
    """Kills the descendants of this process."""
    for _ in range(MAX_ROUNDS):
        found = list(_descendants())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)


def _descendants() -> Iterator[int]:
    """Yields all running descendants, children first, without zombies."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(path.parent.name))
    todo = [os.getpid()]
    while todo:
        found = children.get(todo.pop(), ())
        yield from found
        todo += found
