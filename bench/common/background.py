"""CPU time that other programs use during a benchmark: on a busy machine figures mean little.

Read from Linux's /proc, in clock ticks: the busy time of all cores, including time that a
hypervisor stole, minus the time of our processes. A process is ours if its session is given.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.common.report import Figure, Result, results_of

PROC = Path("/proc")
TOO_BUSY = 0.05  # a report warns if other programs use a larger share of the CPU


@dataclass(frozen=True, slots=True)
class Reading:
    """Clock ticks since the machine booted."""

    total: int  # ticks of all cores
    busy: int
    own: int


def read(sessions: Iterable[int], proc: Path = PROC) -> Reading | None:
    """Reads the counters; None if there is no /proc."""
    try:
        total, busy = machine_ticks((proc / "stat").read_text())
    except OSError:
        return None
    return Reading(
        total, busy, session_ticks((stat for _, stat in _processes(proc)), frozenset(sessions))
    )


def session_seconds(session: int, proc: Path = PROC) -> float:
    """Returns the CPU seconds of all running threads of a session, exact to the nanosecond.

    Raises ProcessLookupError if the session has no threads, or if the kernel does not keep such
    times.
    """
    processes = [path.parent for path, stat in _processes(proc) if _session_of(stat) == session]
    threads = [path for process in processes for path in process.glob("task/[0-9]*/schedstat")]
    nanoseconds = [int(text.split()[0]) for _, text in _readable(threads)]
    if not nanoseconds:
        raise ProcessLookupError(f"no CPU time of session {session}")
    return sum(nanoseconds) / 1e9


def share_of_others(before: Reading | None, after: Reading | None) -> float | None:
    """Returns the share of all cores' time that other programs used between two readings, or
    None.
    """
    if before is None or after is None or after.total == before.total:
        return None
    others = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, others / (after.total - before.total)))


class BusyWatch:
    """Measures the share of the CPU that other programs use, in each of several repetitions."""

    def __init__(self, sessions: Callable[[], Iterable[int]]) -> None:
        """`sessions` is a function that returns the sessions of our running processes."""
        self._sessions = sessions
        self.shares: list[float] = []

    @contextmanager
    def repetition(self, *, idle_s: float = 0.0) -> Iterator[None]:
        """Measures twice: for `idle_s` while our processes wait, then during the block.

        The greater share counts. The first one is also high if a process of ours does not sleep.
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
    """Returns the result `background/cpu` of these shares; empty without a reading."""
    return results_of([{"background/cpu": Figure(100 * share, "%")} for share in shares])


def busy_warning(shares: Iterable[float]) -> list[str]:
    """Returns a warning if other programs used too much CPU in any repetition; otherwise
    nothing.
    """
    busiest = max(shares, default=0.0)
    if busiest <= TOO_BUSY:
        return []
    return [f"other processes used up to {busiest:.0%} of the CPU: figures are too low"]


def machine_ticks(stat: str) -> tuple[int, int]:
    """Returns all ticks and the busy ticks, from the text of /proc/stat."""
    first_line = stat.partition("\n")[0]
    ticks = [int(field) for field in first_line.split()[1:9]]  # guest time is part of user time
    idle = ticks[3] + ticks[4]  # idle, and iowait
    return sum(ticks), sum(ticks) - idle


def session_ticks(stats: Iterable[str], sessions: frozenset[int]) -> int:
    """Returns the ticks of these sessions' processes, from the texts of /proc/<pid>/stat."""
    total = 0
    for stat in stats:
        if _session_of(stat) in sessions:
            # Children that have ended included.
            total += sum(int(field) for field in _fields(stat)[11:15])
    return total


def _session_of(stat: str) -> int:
    return int(_fields(stat)[3])


def _fields(stat: str) -> list[str]:
    """Returns the fields behind the program's name, which ends with ")" and may contain any
    character.
    """
    return stat.rpartition(")")[2].split()


def _processes(proc: Path) -> Iterator[tuple[Path, str]]:
    return _readable(proc.glob("[0-9]*/stat"))


def _readable(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yields files with their texts; files of ended processes and threads are skipped."""
    for path in paths:
        try:
            yield path, path.read_text()
        except OSError:
            continue
