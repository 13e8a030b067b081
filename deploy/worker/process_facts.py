"""This process's use of CPU time, memory and open files."""

import os
import resource
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


def cpu_s() -> float:
    """Seconds of CPU time of all threads since the start."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def process_gauges() -> dict[str, float]:
    """Resident memory, open files and their limit, by the name of the metric."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_memory_bytes": resident_pages * _PAGE_BYTES,
        "open_fds": len(os.listdir("/proc/self/fd")),
        "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
