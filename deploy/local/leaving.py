"""Receives the signals that end a process which runs services, and ends such a process.

`StopSignals` receives SIGINT and SIGTERM for a command that starts services and must stop them.
While services start, the first signal raises an exception, so that the start is undone. A signal
that arrived before the start raises the exception when the start begins. All other signals are
queued, and the command waits for them. So a signal never interrupts the stop of the services.

`end` ends the process after its services are closed. `leave` ends the process and its descendants
at once.

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

MAX_ROUNDS = 20  # several rounds, because a process may fork just before it is killed


def leave(*_: object) -> NoReturn:
    """Signal handler: kills all descendants, then ends this process with status 0."""
    kill_descendants()
    os._exit(0)


def end(status: int) -> NoReturn:
    """Ends this process, whose services are closed.

    Runs the functions registered with atexit first.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream or its reader is closed
            stream.flush()
    os._exit(status)


def kill_descendants() -> None:
    """Kills the descendants of this process."""
    for _ in range(MAX_ROUNDS):
        found = list(_descendants())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):  # the process has ended
                os.kill(pid, signal.SIGKILL)


def _descendants() -> Iterator[int]:
    """Yields all running descendants, children first, without zombies."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # the process has ended
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(path.parent.name))
    todo = [os.getpid()]
    while todo:
        found = children.get(todo.pop(), ())
        yield from found
        todo += found


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopAsked(BaseException):
    """A signal to stop arrived while services were starting."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """Receives SIGINT and SIGTERM of this process. Use this class in the main thread only."""

    def __init__(self) -> None:
        # Received signals; this queue is safe in signal handlers.
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._raises = False

    def install(self) -> None:
        """Installs a handler that queues both signals. Call this before any service is started."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def interrupt(self) -> None:
        """From now on the first signal raises StopAsked.

        If a signal is already queued, raises StopAsked at once.
        """
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
