"""SIGINT and SIGTERM for a benchmark: both undo what it started before it ends.

SIGTERM acts as SIGINT does. In an event loop, asyncio turns that into the cancellation of the main
task, elsewhere Python raises KeyboardInterrupt. Either way contexts are left in order, and the
processes that they own end. The exit status still tells which signal it was.
"""

import signal
from types import FrameType


class EndSignals:
    """The signals that end this process. `last` is the one that came last."""

    def __init__(self) -> None:
        self.last = signal.SIGINT

    def install(self) -> None:
        """Takes both signals, even if our parent ignores SIGINT. Only for the main thread."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._on_term)

    @property
    def exit_status(self) -> int:
        """The status that shells give a command which this signal ended."""
        return 128 + self.last

    def _on_term(self, number: int, _: FrameType | None) -> None:
        self.last = signal.Signals(number)
        signal.raise_signal(signal.SIGINT)


END_SIGNALS = EndSignals()
