"""Limits how often the same event is logged, so that an untrusted peer cannot fill the log."""


class Seldom:
    """Decides when an event is logged that may happen any number of times. Pure."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s: float | None = None
        self._num_unsaid = 0

    def due(self, now_s: float) -> int | None:
        """Counts the event. If a line is due, returns the number of events since the last line."""
        self._num_unsaid += 1
        if self._next_s is not None and now_s < self._next_s:
            return None
        num, self._num_unsaid = self._num_unsaid, 0
        self._next_s = now_s + self._every_s
        return num
