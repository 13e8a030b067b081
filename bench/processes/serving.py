"""`baton serve` as a user runs it: started, found at its URL, and ended with all its processes."""

import os
import queue
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.common.background import PROC
from bench.common.report import Scalar
from bench.processes.child import ChildProcess
from engine.clock import MonotonicClock
from engine.errors import BatonError

BATON = "deploy.commands.main"  # the module that is the command
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0  # gateways, then workers: 30 s each, and a reserve
SERVING = re.compile(r"serving \S+ at (http://\S+)")
NUM_LAST_LINES = 6

Options = Mapping[str, Scalar]  # the command's, by flag


class ServerFailed(BatonError):
    """`baton serve` did not start; the message holds its last lines."""


@dataclass(frozen=True, slots=True)
class ServedDeployment:
    """A running `baton serve`. A child of `pid` forks each service, which leads a session."""

    url: str
    pid: int

    def sessions(self) -> list[int]:
        """Sessions of all services."""
        return [pid for kind in ("gateway", "worker") for pid in self.services(kind)]

    def services(self, kind: str, proc: Path = PROC) -> list[int]:
        """Sessions of its gateways or of its workers. Empty on systems without /proc."""
        found = []
        for path in proc.glob("[0-9]*"):
            with suppress(OSError, IndexError, ValueError):  # the process has ended
                name, parent = _name_and_parent(path)
                if name == f"baton-{kind}" and _name_and_parent(proc / str(parent))[1] == self.pid:
                    found.append(int(path.name))
        return sorted(found)


def free_port() -> int:
    """Returns a port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def kill_at_once(deployment: ServedDeployment, proc: Path = PROC) -> None:
    """Kills the command and every process that descends from it with SIGKILL."""
    children: dict[int, list[int]] = {}
    for path in proc.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):  # the process has ended
            children.setdefault(_name_and_parent(path)[1], []).append(int(path.name))
    found = [deployment.pid]
    for pid in found:  # grows while it is read
        found += children.get(pid, [])
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _name_and_parent(process: Path) -> tuple[str, int]:
    """Raises OSError, IndexError or ValueError if the process has ended."""
    before, _, after = (process / "stat").read_text().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])


@contextmanager
def serving(
    checkpoint: Path,
    options: Options,
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[ServedDeployment]:
    """Runs `baton serve` with plain processes on a port of the system's choice.

    `environment` is added to ours. On leaving, all its processes are gone. Raises ServerFailed.
    """
    flags: Options = {"--launcher": "process", "--port": 0, **options}
    serve = [sys.executable, "-m", BATON, "serve", str(checkpoint)]
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the end
    child = ChildProcess(
        [*serve, *(str(text) for pair in flags.items() for text in pair)],
        on_stderr=lines.put,
        has_stdin=False,
        environment={**os.environ, "COLUMNS": "200", **environment},  # keeps its URL in one line
    )
    try:
        yield ServedDeployment(_url(lines, start_timeout_s), child.pid)
    finally:
        _end(child)


def _url(lines: "queue.SimpleQueue[str | None]", start_timeout_s: float) -> str:
    """Waits for the line in which the server names its URL. Raises ServerFailed."""
    clock = MonotonicClock()
    end_s = clock.now_s() + start_timeout_s
    last: deque[str] = deque(maxlen=NUM_LAST_LINES)
    while True:
        try:
            line = lines.get(timeout=max(0.0, end_s - clock.now_s()))
        except queue.Empty:
            raise ServerFailed(f"baton serve did not start in {start_timeout_s:g} s") from None
        if line is None:
            raise ServerFailed(f"baton serve did not start: {' '.join(' '.join(last).split())}")
        last.append(line)
        if (found := SERVING.search(line)) is not None:
            return found[1]


def _end(child: ChildProcess) -> None:
    """Interrupts the command, then kills all of its processes that remain."""
    sessions = ServedDeployment("", child.pid).sessions()  # while their parent is still known
    try:
        with suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGINT)
        child.ends_within(STOP_TIMEOUT_S)
    finally:
        for session in sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        child.kill()
