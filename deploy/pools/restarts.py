"""Computes when a failed service is restarted: each failure in a row doubles the wait.

A start that fails quickly costs little, and its cause, such as a full disk, may disappear at any
time. So it is retried sooner: the wait is at most ten times as long as the failed start took.
"""

from dataclasses import dataclass

FIRST_RESTART_S = 1.0
LAST_RESTART_S = 60.0
MAX_DOUBLINGS = 6  # number of doublings until the wait is longest
STEADY_S = 60.0
LOOPS_AFTER = 3  # failures in a row after which a service counts as looping
QUICK_S = 5.0  # seconds to wait after a start that failed at once
QUICK_SHARE = 10.0  # longest quick wait / duration of the failed start
QUICK_TRIES = 60  # number of quick retries; after that, the cause is unlikely to disappear soon


@dataclass(slots=True)
class _Restart:
    """A service's failures in a row, and the times of its present and next start."""

    num_failed: int = 0
    due_s: float | None = None  # None while the service runs
    begun_s: float | None = None  # begin of the present start; None once the service runs
    started_s: float | None = None
    num_ends: int = 0  # number of all ends and failed starts
    why: str = ""  # reason of the last end or failed start


class Restarts:
    """The failures of all services, by name. Pure: callers pass the time."""

    def __init__(self, steady_s: float = STEADY_S) -> None:
        """If a service has run for `steady_s` seconds, its next failure counts as the first in a
        row.
        """
        self._steady_s = steady_s
        self._restarts: dict[str, _Restart] = {}

    def failed(self, name: str, now_s: float) -> float:
        """Records an end or a failed start. Returns the seconds until the next start."""
        restart = self._restarts.setdefault(name, _Restart())
        started_s, restart.started_s = restart.started_s, None
        if started_s is not None and now_s - started_s >= self._steady_s:
            restart.num_failed = 0
        delay_s = FIRST_RESTART_S * float(2 ** min(restart.num_failed, MAX_DOUBLINGS))
        begun_s, restart.begun_s = restart.begun_s, None
        if begun_s is not None and restart.num_failed < QUICK_TRIES:
            delay_s = min(delay_s, max(QUICK_S, QUICK_SHARE * (now_s - begun_s)))
        delay_s = min(delay_s, LAST_RESTART_S)
        restart.num_failed += 1
        restart.num_ends += 1
        restart.due_s = now_s + delay_s
        return delay_s

    def record_end(self, name: str, now_s: float, why: str) -> str:
        """Records an end or a failed start with its reason. Returns a sentence for operators."""
        delay_s = self.failed(name, now_s)
        self._restarts[name].why = why
        looping = ""
        if self.is_looping(name):
            looping = f"for the {self.num_failed(name)}. time in a row, "
        return f"{looping}it is started again in {delay_s:g} s"

    def begun(self, name: str, now_s: float) -> None:
        """Records that a start of a service has begun."""
        self._restarts.setdefault(name, _Restart()).begun_s = now_s

    def started(self, name: str, now_s: float) -> None:
        """Records that a service runs."""
        restart = self._restarts.setdefault(name, _Restart())
        restart.due_s = restart.begun_s = None
        restart.started_s = now_s
        restart.why = ""

    def restart_now(self, name: str, now_s: float) -> None:
        """Makes a waiting service's next start due now."""
        restart = self._restarts.get(name)
        if restart is not None and restart.due_s is not None:
            restart.due_s = min(restart.due_s, now_s)

    def is_due(self, name: str, now_s: float) -> bool:
        """True if a service may be started now.

        A service that has never failed may always be started.
        """
        restart = self._restarts.get(name)
        return restart is None or restart.due_s is None or restart.due_s <= now_s

    def num_failed(self, name: str) -> int:
        """Returns a service's number of failures in a row."""
        restart = self._restarts.get(name)
        return 0 if restart is None else restart.num_failed

    def num_ends(self, name: str) -> int:
        """Returns the number of ends and failed starts since the service has been wanted."""
        restart = self._restarts.get(name)
        return 0 if restart is None else restart.num_ends

    def why(self, name: str) -> str:
        """Returns the reason of a service's last end or failed start.

        Empty once the service runs.
        """
        restart = self._restarts.get(name)
        return "" if restart is None else restart.why

    def is_looping(self, name: str) -> bool:
        """True if a service has failed so often in a row that another start is unlikely to help."""
        return self.num_failed(name) >= LOOPS_AFTER

    def remove(self, name: str) -> None:
        """Removes the records of a service that is no longer wanted."""
        self._restarts.pop(name, None)
