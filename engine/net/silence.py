"""How long somebody has been silent, as far as that is known.

Time counts only while it was listened. A process that was stopped, or whose loop was held up, reads
afterwards what others sent meanwhile: it must not take itself for the only one alive. So whoever
listens looks again and again, and between two looks no more is counted than `MAX_BETWEEN_LOOKS_S`,
however much later the second one comes.
"""

MAX_BETWEEN_LOOKS_S = 1.0


class Silence:
    """Seconds since the last sign of life, summed up from look to look."""

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self._looked_s = now_s
        self._is_broken = False

    def broken(self) -> None:
        """There was a sign of life. To be called as often as there is one: it costs next to
        nothing.
        """
        self._is_broken = True

    def look(self, now_s: float) -> float:
        """How long it has lasted."""
        passed_s = min(now_s - self._looked_s, MAX_BETWEEN_LOOKS_S)
        self.seconds = 0.0 if self._is_broken else self.seconds + passed_s
        self._looked_s, self._is_broken = now_s, False
        return self.seconds
