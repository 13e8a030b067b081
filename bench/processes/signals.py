"""SIGINT and SIGTERM for a benchmark: both undo what it started before it ends.

SIGTERM acts as SIGINT does. In an event loop, asyncio turns that into the cancellation of the main
task, elsewhere Python raises KeyboardInterrupt. In both cases context managers are left in order
and end their processes. The exit status still shows which signal it was.
"""

import signal
from types import FrameType


class EndSignals:
    """The signals that end this process. `last` is the most recent signal."""

    def __init__(self) -> None:
        self.last = signal.SIGINT

    def install(self) -> None:
        """Takes both signals, even if our parent ignores SIGINT. Only for the main thread."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._on_term)

    @property
    def exit_status(self) -> int:
        """Returns the exit status that shells use for a command that this signal ended."""
        return 128 + self.last

    def _on_term(self, number: int, _: FrameType | None) -> None:
        self.last = signal.Signals(number)
        signal.raise_signal(signal.SIGINT)


END_SIGNALS = EndSignals()
