"""The deployment under chaos as an operator sees it: metrics, and a list of processes."""

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from bench.background import PROC
from bench.chaos.checker import Books
from bench.serving import Served
from engine.messages import Role

MARK = "BATON_CHAOS_MARK"
LISTENING = "0A"
_SAMPLE = re.compile(r"^baton_worker_(blocks|open_leases|running_seqs|waiting_seqs)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_STATES = ("free", "cached", "owned", "leased", "in_flight")


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker that a gateway has a session with, and that has reported."""

    role: Role
    books: Books
    num_seqs: int


def workers_of(page: str) -> dict[str, WorkerSeen]:
    """What a gateway's /metrics says of workers, by name."""
    figures: dict[str, dict[str, int]] = {}
    roles: dict[str, Role] = {}
    for line in page.splitlines():
        if (found := _SAMPLE.match(line)) is None:
            continue
        labels: dict[str, str] = dict(_LABEL.findall(found[2]))
        name = labels["worker"]
        roles[name] = Role(labels["role"])
        figures.setdefault(name, {})[labels.get("state") or found[1]] = int(float(found[3]))
    return {name: _seen(roles[name], own) for name, own in sorted(figures.items())}


def _seen(role: Role, figures: Mapping[str, int]) -> WorkerSeen:
    free, cached, owned, leased, in_flight = (figures[state] for state in _STATES)
    books = Books(free, cached, owned, leased, in_flight, figures["open_leases"])
    return WorkerSeen(role, books, figures["running_seqs"] + figures["waiting_seqs"])


def num_listening(table: str, port: int) -> int:
    """Sockets that take connections at a port, by the text of /proc/net/tcp."""
    ends = (line.split()[1:4] for line in table.splitlines()[1:])
    return sum(
        state == LISTENING and int(local.rpartition(":")[2], 16) == port for local, _, state in ends
    )


class Deployment:
    """What runs behind a URL on this machine."""

    def __init__(self, served: Served, session: aiohttp.ClientSession, mark: str) -> None:
        self._served = served
        self._session = session
        self._mark = mark

    @property
    def url(self) -> str:
        """Where it is asked."""
        return self._served.url

    async def workers(self) -> dict[str, WorkerSeen]:
        """As a gateway sees them now; empty where none answers."""
        try:
            async with self._session.get(f"{self.url}/metrics") as response:
                return workers_of(await response.text())
        except (aiohttp.ClientError, TimeoutError):
            return {}

    def pids(self, kind: str) -> dict[str, int]:
        """Its gateways or workers, by name."""
        return self._served.named(kind)

    def num_listening(self, proc: Path = PROC) -> int:
        """Gateway processes that take connections; one that starts does that last of all."""
        port = urlsplit(self.url).port
        assert port is not None
        return num_listening((proc / "net" / "tcp").read_text(), port)

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Whether there still was somebody to take it. Only of this deployment."""
        if pid not in self._served.sessions():
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def marked(self, proc: Path = PROC) -> dict[int, str]:
        """Command lines of all that descends from it and lives, by process id."""
        found = {}
        for path in proc.glob("[0-9]*"):
            try:
                if f"{MARK}={self._mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(path.name)] = command.strip()
            except OSError:  # it has ended, or is not ours
                continue
        return found

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self._served.pid, signal.SIGINT)

    def has_ended(self) -> bool:
        """Whether the command is over. It is left to be waited for."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._served.pid, look) is not None
