"""Where, when and by which command a benchmark ran: all facts of a report beside its results."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.common.report import Hardware, Report, Result, Scalar

HERE = Path(__file__).resolve().parent
OUTPUTS = ("--json", "--plot", "--csv", "--html")
CODE = (":(top)", ":(top,exclude)bench/results", ":(top,exclude)docs", ":(top,exclude)*.md")


def report_here(
    bench: str, *, seed: int, config: Mapping[str, Scalar], results: Sequence[Result]
) -> Report:
    """Makes the report of a benchmark that this process has just run."""
    return Report(
        bench=bench,
        command=command_line(sys.argv),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
        hardware=hardware(),
        seed=seed,
        config=config,
        results=tuple(results),
    )


def command_line(arguments: Sequence[str]) -> str:
    """Returns the command as a user types it, from `sys.argv`.

    Output files are left out. Paths of this machine are shortened: an absolute path to its last
    part, and a peer's Python to `PYTHON`.
    """
    program, *given = arguments
    words = ["baton"]
    if Path(program).name == "__main__.py":
        words = ["python", "-m", f"bench.{Path(program).parent.name}"]
    following = iter(given)
    for word in following:
        if word in OUTPUTS:
            next(following, None)
        elif not word.startswith(tuple(f"{option}=" for option in OUTPUTS)):
            words.append(_without_place(word))
    return shlex.join(words)


def _without_place(word: str) -> str:
    """Shortens `name=/a/python` to `name=PYTHON`, and `/a/trace.jsonl` to `trace.jsonl`."""
    name, equals, value = word.partition("=")
    if equals and "/" in value and not name.startswith("-"):
        return f"{name}=PYTHON"
    return Path(word).name if word.startswith("/") else word


def commit() -> str | None:
    """Returns the commit of the checkout that tracks this file, with `-dirty` if tracked files
    differ.

    Changes of reports and documents do not count as dirty.

    Returns None without such a checkout. An installed copy may lie inside another repository, whose
    commit must not be reported.
    """
    if _output("git", "ls-files", "--error-unmatch", __file__) is None:
        return None
    head = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no", "--", *CODE)
    return f"{head}-dirty" if head and changes else head


def hardware() -> Hardware:
    """Describes the machine that this process runs on."""
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
    """Returns a command's output; None if the command is missing, fails or takes over 10 s."""
    try:
        done = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
