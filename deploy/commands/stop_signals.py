"""SIGINT and SIGTERM of a command that starts something, and has to end it.

While it starts, a signal is raised as an exception, so that whatever was begun is undone. From then
on signals are kept in order for the command to wait for. So is every signal after the first: what
ends does so undisturbed.
"""

import contextlib
import queue
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopAsked(BaseException):
    """A signal came while something starts."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """To be used in the main thread."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()  # which a handler may put to
        self._raises = True

    def install(self) -> None:
        """From now on signals come here."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def keep(self) -> None:
        """From now on none is raised."""
        self._raises = False

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The next signal, or None if there is none in time."""
        with contextlib.suppress(queue.Empty):
            return self._came.get(timeout=timeout_s)
        return None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise StopAsked(number)
        self._came.put(number)


def exit_status(number: int) -> int:
    """As shells have it of a command that a signal ended."""
    return 128 + number
