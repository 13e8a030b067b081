"""How often the same thing is said: what any stranger can cause must not fill the log."""


class Seldom:
    """Says when something is to be logged that may happen any number of times. Pure."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s: float | None = None
        self._num_unsaid = 0

    def due(self, now_s: float) -> int | None:
        """How often it has happened since it was logged, if it is to be logged now."""
        self._num_unsaid += 1
        if self._next_s is not None and now_s < self._next_s:
            return None
        num, self._num_unsaid = self._num_unsaid, 0
        self._next_s = now_s + self._every_s
        return num
