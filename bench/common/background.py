"""Measures the CPU time that other programs use during a benchmark, since they distort its figures.

The source is Linux's /proc, in clock ticks. The result is the busy time of all cores, including
time that a hypervisor stole, minus the time of our processes. A process is ours if its session id
is among the given ones.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.common.report import Figure, Result, results_of

PROC = Path("/proc")
TOO_BUSY = 0.05  # a report has a warning if other programs use a larger share of the CPU


@dataclass(frozen=True, slots=True)
class Reading:
    """Clock ticks from boot to one moment: of all cores, busy, and of our processes."""

    total: int  # ticks of all cores, busy or idle
    busy: int
    own: int


def read(sessions: Iterable[int], proc: Path = PROC) -> Reading | None:
    """Reads the tick counters; returns None if there is no /proc."""
    try:
        total, busy = machine_ticks((proc / "stat").read_text())
    except OSError:
        return None
    return Reading(
        total, busy, session_ticks((stat for _, stat in _processes(proc)), frozenset(sessions))
    )


def session_seconds(session: int, proc: Path = PROC) -> float:
    """Returns the CPU seconds of all running threads of a session, in nanosecond precision.

    Raises ProcessLookupError if the session has no threads, or if the kernel does not record such
    times.
    """
    processes = [path.parent for path, stat in _processes(proc) if _session_of(stat) == session]
    threads = [path for process in processes for path in process.glob("task/[0-9]*/schedstat")]
    nanoseconds = [int(text.split()[0]) for _, text in _readable(threads)]
    if not nanoseconds:
        raise ProcessLookupError(f"no CPU time of session {session}")
    return sum(nanoseconds) / 1e9


def share_of_others(before: Reading | None, after: Reading | None) -> float | None:
    """Returns the share of all cores' time that other programs used between two readings. None if a
    reading is missing.
    """
    if before is None or after is None or after.total == before.total:
        return None
    others = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, others / (after.total - before.total)))


class BusyWatch:
    """Measures the share of the CPU that other programs use, in each of several repetitions."""

    def __init__(self, sessions: Callable[[], Iterable[int]]) -> None:
        """Sets up the watch. `sessions` is a function that returns the session ids of our running
        processes.
        """
        self._sessions = sessions
        self.shares: list[float] = []

    @contextmanager
    def repetition(self, *, idle_s: float = 0.0) -> Iterator[None]:
        """Measures twice: for `idle_s` while our processes wait, then during the block.

        The repetition's result is the larger share. The first share is also high if a process of
        ours does not sleep.
        """
        idle_share = 0.0
        if idle_s:
            before = read(())
            threading.Event().wait(idle_s)
            idle_share = share_of_others(before, read(())) or 0.0
        before = read(self._sessions())
        yield
        share = share_of_others(before, read(self._sessions()))
        if share is not None:
            self.shares.append(max(share, idle_share))


def busy_results(shares: Sequence[float]) -> tuple[Result, ...]:
    """Returns the result `background/cpu` of these shares; empty if there are no shares."""
    return results_of([{"background/cpu": Figure(100 * share, "%")} for share in shares])


def busy_warning(shares: Iterable[float]) -> list[str]:
    """Returns a warning if other programs used too much CPU in any repetition, else an empty
    list.
    """
    busiest = max(shares, default=0.0)
    if busiest <= TOO_BUSY:
        return []
    return [f"other processes used up to {busiest:.0%} of the CPU: figures are too low"]


def machine_ticks(stat: str) -> tuple[int, int]:
    """Returns the total ticks and the busy ticks in the text of /proc/stat."""
    first_line = stat.partition("\n")[0]
    # user, nice, system, idle, iowait, irq, softirq, steal; user includes guest time
    ticks = [int(field) for field in first_line.split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle and iowait ticks
    return sum(ticks), sum(ticks) - idle


def session_ticks(stats: Iterable[str], sessions: frozenset[int]) -> int:
    """Returns the ticks of these sessions' processes, from the texts of /proc/<pid>/stat."""
    total = 0
    for stat in stats:
        if _session_of(stat) in sessions:
            # user and system ticks, of the process and of its children that have ended
            total += sum(int(field) for field in _fields(stat)[11:15])
    return total


def _session_of(stat: str) -> int:
    return int(_fields(stat)[3])


def _fields(stat: str) -> list[str]:
    """Returns the fields after the program's name. The name ends with ")" and may contain any
    character.
    """
    return stat.rpartition(")")[2].split()


def _processes(proc: Path) -> Iterator[tuple[Path, str]]:
    return _readable(proc.glob("[0-9]*/stat"))


def _readable(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yields files with their texts. Skips files of processes and threads that have ended."""
    for path in paths:
        try:
            yield path, path.read_text()
        except OSError:
            continue
