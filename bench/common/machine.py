"""What a report says of where it ran: the commit of this code and the hardware under it."""

import os
import platform
import subprocess
from pathlib import Path

from bench.common.report import Hardware

HERE = Path(__file__).resolve().parent


def commit() -> str | None:
    """Commit of the checkout this file is tracked in, with `-dirty` where tracked files differ.

    None where there is no such checkout: an installed copy inside somebody else's repository
    must not borrow that repository's commit.
    """
    if _output("git", "ls-files", "--error-unmatch", __file__) is None:
        return None
    head = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if head and changes else head


def hardware() -> Hardware:
    """The machine this process runs on."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or ""
    return Hardware(
        cpu=_cpu_model(),
        num_cores=_num_cores(),
        memory_bytes=_memory_bytes(),
        gpus=tuple(gpus.splitlines()),
        python=platform.python_version(),
    )


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, None) or platform.processor() or None


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
