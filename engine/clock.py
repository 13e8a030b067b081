"""The only module that reads the machine's clock; cores take `now_s` as an argument."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of times in seconds, which never decrease. Only differences between times have a
    meaning.
    """

    def now_s(self) -> float:
        """Seconds since an arbitrary origin."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. On Linux all processes of one host see the same times."""

    now_s = staticmethod(time.monotonic)  # seconds since the host booted


def unix_time_s() -> int:
    """Wall-clock seconds since 1970, for `created` fields; never used to measure."""
    return int(time.time())


# Wall-clock nanoseconds since 1970, to place spans and events in time; never used to measure.
unix_time_ns = time.time_ns
