"""Stops calls to a failing object store, and tries again later. Pure: time is an argument.

After `MAX_FAILURES` failures in a row, calls stop for a second. After a pause, a single failure
stops them again. Each pause is twice as long as the last, up to five minutes. A success resets the
count and the pause.
"""

MAX_FAILURES = 4
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0


class CallBreaker:
    """Decides if calls may be made now."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._reason = ""
        self._off_until_s: float | None = None

    def why_off(self, now_s: float) -> str | None:
        """Returns why no calls are made now, or None if they are."""
        is_off = self._off_until_s is not None and now_s < self._off_until_s
        return self._reason if is_off else None

    def succeeded(self, now_s: float) -> None:
        """Records an answer. During a pause, a late answer of an earlier call does not count."""
        if self.why_off(now_s) is None:
            self._num_failures = 0
            self._pause_s = FIRST_PAUSE_S

    def failed(self, reason: str, now_s: float) -> None:
        """Records a call that failed or was not answered in time."""
        if self.why_off(now_s) is None:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self.trip(reason, now_s)

    def trip(self, reason: str, now_s: float) -> None:
        """Stops calls for a pause, if they are not stopped already."""
        if self.why_off(now_s) is None:
            self._reason = reason
            self._off_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._num_failures = MAX_FAILURES - 1
