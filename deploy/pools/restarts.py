"""Times the restarts of services: each failure in a row doubles the wait.

A start that fails quickly costs little, so it is repeated sooner: its cause, such as a full disk,
may disappear at any time. The wait is then at most ten times the time of the failed start.
"""

from dataclasses import dataclass

FIRST_RESTART_S = 1.0
LAST_RESTART_S = 60.0
MAX_DOUBLINGS = 6  # doublings until the longest wait is reached
STEADY_S = 60.0
LOOPS_AFTER = 3  # failures in a row after which a service counts as looping
QUICK_S = 5.0  # the wait after a start that failed at once
QUICK_SHARE = 10.0  # the wait over the time that the failed start took
QUICK_TRIES = 60  # number of quick retries: after these, the cause is not likely to disappear soon


@dataclass(slots=True)
class _Restart:
    """A service's failures in a row, and the times of its start and its next start."""

    num_failed: int = 0
    due_s: float | None = None  # None while the service runs
    begun_s: float | None = None  # time of the present start, until the service runs
    started_s: float | None = None
    num_ends: int = 0  # all ends and failed starts
    why: str = ""  # reason of the last end or failed start


class Restarts:
    """Failures of workers and gateways, by name. Pure: the clock comes from outside."""

    def __init__(self, steady_s: float = STEADY_S) -> None:
        """After a run of `steady_s`, the next failure counts as the first one."""
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
        """Like `failed`, but also keeps the reason, and returns a sentence for operators."""
        delay_s = self.failed(name, now_s)
        self._restarts[name].why = why
        looping = ""
        if self.is_looping(name):
            looping = f"for the {self.num_failed(name)}. time in a row, "
        return f"{looping}it is started again in {delay_s:g} s"

    def begun(self, name: str, now_s: float) -> None:
        """Records that a service is being started."""
        self._restarts.setdefault(name, _Restart()).begun_s = now_s

    def started(self, name: str, now_s: float) -> None:
        """Records that a service runs."""
        restart = self._restarts.setdefault(name, _Restart())
        restart.due_s = restart.begun_s = None
        restart.started_s = now_s
        restart.why = ""

    def restart_now(self, name: str, now_s: float) -> None:
        """Makes the next start of a waiting service due now."""
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
        """Returns the number of ends and failed starts of a service since it has been wanted."""
        restart = self._restarts.get(name)
        return 0 if restart is None else restart.num_ends

    def why(self, name: str) -> str:
        """Returns the reason of the last end or failed start; empty once the service runs."""
        restart = self._restarts.get(name)
        return "" if restart is None else restart.why

    def is_looping(self, name: str) -> bool:
        """True if a service fails so often that another start is not likely to help."""
        return self.num_failed(name) >= LOOPS_AFTER

    def remove(self, name: str) -> None:
        """Removes a service that is no longer wanted."""
        self._restarts.pop(name, None)
