"""How a process that runs services hears that it must end, and ends.

`StopSignals` receives SIGINT and SIGTERM for a command that starts services and has to end them.
While services start, the first signal raises an exception, so that the start is undone. A signal
from before the start raises the exception as soon as the start begins. All other signals are queued
for the command to wait for: the end itself is never interrupted.

`end` ends the process after its services are closed, `leave` at once with its descendants.

`sys.exit` waits for threads that load or fetch a model, which may take minutes. Then it frees all
modules and objects, which takes a second if torch or Ray is loaded. `os._exit` waits for nothing,
but does not stop a compiler that such a thread has started.
"""

import atexit
import contextlib
import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
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


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopAsked(BaseException):
    """A signal came while services start."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """Receives the signals of this process. Use it in the main thread."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()  # safe to use in a signal handler
        self._raises = False

    def install(self) -> None:
        """Handles both signals by queueing them. Call it before anything is started."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def interrupt(self) -> None:
        """From now on the first signal raises StopAsked. A queued signal raises it here."""
        self._raises = True
        with contextlib.suppress(queue.Empty):
            number = self._came.get_nowait()
            self._raises = False
            raise StopAsked(number)

    def keep(self) -> None:
        """From now on, queues signals instead of raising StopAsked."""
        self._raises = False

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Returns the next signal, or None after the timeout."""
        with contextlib.suppress(queue.Empty):
            return self._came.get(timeout=timeout_s)
        return None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise StopAsked(number)
        self._came.put(number)


def exit_status(number: int) -> int:
    """Returns the exit status by which shells report a command ended by this signal."""
    return 128 + number
