"""Times the restarts of services: each failure in a row doubles the wait.

A start that fails soon costs little, so it is tried again sooner: the cause, such as a full disk,
may be gone any time. The wait is then at most ten times what the start took.
"""

from dataclasses import dataclass

FIRST_RESTART_S = 1.0
LAST_RESTART_S = 60.0
MAX_DOUBLINGS = 6  # by which the last is reached
STEADY_S = 60.0
LOOPS_AFTER = 3  # failures in a row
QUICK_S = 5.0  # the wait after a start that failed at once
QUICK_SHARE = 10.0  # the wait over the time that the failed start took
QUICK_TRIES = 60  # then it is not likely to be gone soon


@dataclass(slots=True)
class _Restart:
    """A service's failures in a row, and the times of its start and its next start."""

    num_failed: int = 0
    due_s: float | None = None  # None while it runs
    begun_s: float | None = None  # the present start, until it runs
    started_s: float | None = None
    num_ends: int = 0  # in all
    why: str = ""  # it ended or did not start, the last time


class Restarts:
    """Failures of workers and gateways, by name. Pure: the clock comes from outside."""

    def __init__(self, steady_s: float = STEADY_S) -> None:
        """After a run of `steady_s` a failure counts as the first again."""
        self._steady_s = steady_s
        self._restarts: dict[str, _Restart] = {}

    def failed(self, name: str, now_s: float) -> float:
        """Notes that a service ended or did not start. Returns in how many seconds it is due."""
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
        """Like `failed`, but keeps why, and returns the sentence that operators read."""
        delay_s = self.failed(name, now_s)
        self._restarts[name].why = why
        looping = ""
        if self.is_looping(name):
            looping = f"for the {self.num_failed(name)}. time in a row, "
        return f"{looping}it is started again in {delay_s:g} s"

    def begun(self, name: str, now_s: float) -> None:
        """Notes that a service is being started."""
        self._restarts.setdefault(name, _Restart()).begun_s = now_s

    def started(self, name: str, now_s: float) -> None:
        """Notes that a service runs."""
        restart = self._restarts.setdefault(name, _Restart())
        restart.due_s = restart.begun_s = None
        restart.started_s = now_s
        restart.why = ""

    def restart_now(self, name: str, now_s: float) -> None:
        """Lets a service that waits for its next start begin it now."""
        restart = self._restarts.get(name)
        if restart is not None and restart.due_s is not None:
            restart.due_s = min(restart.due_s, now_s)

    def is_due(self, name: str, now_s: float) -> bool:
        """True if a service may be started now. A service that never failed may."""
        restart = self._restarts.get(name)
        return restart is None or restart.due_s is None or restart.due_s <= now_s

    def num_failed(self, name: str) -> int:
        """Returns the failures in a row."""
        restart = self._restarts.get(name)
        return 0 if restart is None else restart.num_failed

    def num_ends(self, name: str) -> int:
        """Returns how often a service ended by itself or did not start, since it is wanted."""
        restart = self._restarts.get(name)
        return 0 if restart is None else restart.num_ends

    def why(self, name: str) -> str:
        """Returns why a service ended or did not start, until it runs again; else nothing."""
        restart = self._restarts.get(name)
        return "" if restart is None else restart.why

    def is_looping(self, name: str) -> bool:
        """True if a service fails so often that another start is not likely to help."""
        return self.num_failed(name) >= LOOPS_AFTER

    def remove(self, name: str) -> None:
        """Forgets a service that is not wanted any more."""
        self._restarts.pop(name, None)
