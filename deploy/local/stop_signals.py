"""SIGINT and SIGTERM for a command that starts services and has to end them.

While services start, the first signal raises an exception, so that the start is undone. A signal
from before the start raises the exception as soon as the start begins. All other signals are queued
for the command to wait for: the end itself is never interrupted.
"""

import contextlib
import queue
import signal
from types import FrameType

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
