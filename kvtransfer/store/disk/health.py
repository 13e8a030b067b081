"""Decides when a disk is off: after several failures in a row, for a growing pause.

    fine ── `most_failures` in a row ──> off ── pause over: one trial ──> fine again
                                          ^── it fails: twice the pause ──┘

Pure: the time is an argument.
"""


class DiskHealth:
    """Counts failures in a row. `off_reason` says why the disk is off, or None while it is on."""

    def __init__(self, most_failures: int, *, pause_s: float = 1.0, most_pause_s: float = 60.0):
        self.off_reason: str | None = None
        self._most_failures = most_failures
        self._shortest_pause_s = pause_s
        self._most_pause_s = most_pause_s
        self._pause_s = pause_s
        self._retry_at_s = 0.0
        self._failures = 0
        self._is_trying = False

    def admits(self, now_s: float) -> bool:
        """Returns True if the disk may be used now. While it is off, one trial per pause may."""
        if self.off_reason is None:
            return True
        if self._is_trying or now_s < self._retry_at_s:
            return False
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        """Records a success of the disk."""
        self.off_reason = None
        self._failures = 0
        self._is_trying = False
        self._pause_s = self._shortest_pause_s

    def failed(self, reason: str, now_s: float) -> bool:
        """Records a failure. Returns True if this failure turns the disk off."""
        self._failures += 1
        if self.off_reason is None:
            if self._failures < self._most_failures:
                return False
            self.off_reason = reason
            self._retry_at_s = now_s + self._pause_s
            return True
        if self._is_trying:  # failures of earlier requests do not count
            self.off_reason = reason
            self._is_trying = False
            self._pause_s = min(2 * self._pause_s, self._most_pause_s)
            self._retry_at_s = now_s + self._pause_s
        return False
