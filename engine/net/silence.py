"""Measures how long a peer has been silent.

Time in which we were paused does not count as a peer's silence. A process that was stopped, or
whose loop was held up, reads afterwards what others sent meanwhile. It must not conclude that its
peers are dead. So the listener checks at short intervals, and each interval counts as at most
`MAX_BETWEEN_LOOKS_S`, however long it really was.
"""

MAX_BETWEEN_LOOKS_S = 1.0


class Silence:
    """Seconds since the last sign of life, summed over the intervals between checks."""

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self._looked_s = now_s
        self._is_broken = False

    def broken(self) -> None:
        """Records a sign of life. It is cheap: call it for each one."""
        self._is_broken = True

    def check(self, now_s: float) -> float:
        """Returns how long the silence has lasted, in seconds."""
        passed_s = min(now_s - self._looked_s, MAX_BETWEEN_LOOKS_S)
        self.seconds = 0.0 if self._is_broken else self.seconds + passed_s
        self._looked_s, self._is_broken = now_s, False
        return self.seconds
