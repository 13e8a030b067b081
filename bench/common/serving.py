"""`baton serve` as a user runs it: started, found at its URL, and ended with all its processes."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from bench.common.background import PROC
from bench.common.report import Scalar
from engine.clock import MonotonicClock
from engine.errors import BatonError

BATON = "deploy.commands.main"  # the module that is the command
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0  # a service that does not end is given 30 s, and one ends after the other
READ_TIMEOUT_S = 20.0
SERVING = re.compile(r"serving \S+ at (http://\S+)")
NUM_LAST_LINES = 6

Options = Mapping[str, Scalar]  # of the command, by flag


class ServerFailed(BatonError):
    """`baton serve` did not start; the message holds the last that it said."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running deployment: a child of `pid` forks each service, which leads a session."""

    url: str
    pid: int

    def sessions(self, proc: Path = PROC) -> list[int]:
        """Those of all services."""
        return [pid for kind in ("gateway", "worker") for pid in self.services(kind, proc)]

    def services(self, kind: str, proc: Path = PROC) -> list[int]:
        """Sessions of its gateways or of its workers. Empty where there is no /proc to look at."""
        found = []
        for path in proc.glob("[0-9]*"):
            with suppress(OSError, IndexError, ValueError):  # it has ended
                name, parent = _name_and_parent(path)
                if name == f"baton-{kind}" and _name_and_parent(proc / str(parent))[1] == self.pid:
                    found.append(int(path.name))
        return sorted(found)


def _name_and_parent(process: Path) -> tuple[str, int]:
    """Raises OSError, IndexError and ValueError where there is none (any more)."""
    before, _, after = (process / "stat").read_text().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])


@contextmanager
def serving(
    checkpoint: Path,
    options: Options,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    """Runs `baton serve` with plain processes on a port of the system's choice.

    `environment` is added to ours.

    On leaving, all its processes are gone. Raises ServerFailed.
    """
    flags: Options = {"--launcher": "process", "--port": 0, **options}
    serve = [sys.executable, "-m", BATON, "serve", str(checkpoint)]
    process = subprocess.Popen(
        [*serve, *(str(text) for pair in flags.items() for text in pair)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "COLUMNS": "200", **environment},  # its URL stays in one line
        start_new_session=True,
    )
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: no more will come
    reader = threading.Thread(target=_read, args=(process.stderr, said), daemon=True)
    reader.start()
    try:
        yield Served(_url(said), process.pid)
    finally:
        _end(process)
        reader.join(READ_TIMEOUT_S)
        if not reader.is_alive():  # else closing would wait for it
            process.stderr.close()  # type: ignore[union-attr]


def _read(pipe: IO[str], said: "queue.SimpleQueue[str | None]") -> None:
    for line in pipe:  # to the end, or the server would wait for somebody who reads
        said.put(line)
    said.put(None)


def _url(said: "queue.SimpleQueue[str | None]") -> str:
    """Waits for the line in which the server names its URL. Raises ServerFailed."""
    clock = MonotonicClock()
    end_s = clock.now_s() + START_TIMEOUT_S
    last: deque[str] = deque(maxlen=NUM_LAST_LINES)
    while True:
        try:
            line = said.get(timeout=max(0.0, end_s - clock.now_s()))
        except queue.Empty:
            raise ServerFailed(f"baton serve did not start in {START_TIMEOUT_S:g} s") from None
        if line is None:
            raise ServerFailed(f"baton serve did not start: {' '.join(' '.join(last).split())}")
        last.append(line)
        if (found := SERVING.search(line)) is not None:
            return found[1]


def _end(process: "subprocess.Popen[str]") -> None:
    """Asks it to end, then ends what is left of it and of its services by force."""
    sessions = [process.pid, *Served("", process.pid).sessions()]  # whose parent is still known
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)
    finally:
        for session in sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        process.wait()
