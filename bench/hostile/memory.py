"""Private memory of a deployment's processes, from Linux's /proc.

Blocks of KV are in shared memory, whose pages count from their first use on. They are left out.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from bench.common.background import PROC

KIB = 1024


def private_bytes(sessions: Iterable[int], proc: Path = PROC) -> int:
    """Anonymous resident memory of all processes of these sessions."""
    wanted = frozenset(sessions)
    return sum(_rss_anon_bytes(path) for path in _processes(wanted, proc))


def _processes(sessions: frozenset[int], proc: Path) -> Iterator[Path]:
    for path in proc.glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has ended
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                yield path


def _rss_anon_bytes(process: Path) -> int:
    with suppress(OSError):  # it has ended
        for line in (process / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * KIB
    return 0
