"""Measures this process's use of CPU time, memory and open files."""

import os
import resource
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


def cpu_s() -> float:
    """Returns the CPU time in seconds that all threads have used since the start."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def process_gauges() -> dict[str, float]:
    """Returns resident memory, and the number and limit of open files, by metric."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_memory_bytes": resident_pages * _PAGE_BYTES,
        "open_fds": len(os.listdir("/proc/self/fd")),
        "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
