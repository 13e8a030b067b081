"""Measures how long a peer has been silent.

Time in which this process was paused is not counted as silence of a peer. After a process was
stopped, or its event loop was blocked, it reads what peers have sent meanwhile. Until then it must
not conclude that its peers are dead. So it checks at short intervals. Each interval is counted with
at most `MAX_BETWEEN_LOOKS_S`, however long it really was.
"""

MAX_BETWEEN_LOOKS_S = 1.0


class Silence:
    """Seconds since the peer's last sign of life, summed over the intervals between checks."""

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self._looked_s = now_s
        self._is_broken = False

    def broken(self) -> None:
        """Records a sign of life of the peer. It is cheap enough to be called for each one."""
        self._is_broken = True

    def check(self, now_s: float) -> float:
        """Returns how long the peer has been silent, in seconds."""
        passed_s = min(now_s - self._looked_s, MAX_BETWEEN_LOOKS_S)
        self.seconds = 0.0 if self._is_broken else self.seconds + passed_s
        self._looked_s, self._is_broken = now_s, False
        return self.seconds
