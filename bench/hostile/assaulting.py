"""Runs the assaults of `bench hostile`: an attacker's process, and the memory after each."""

import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.common.background import PROC
from bench.common.waiting import holds_within
from bench.processes.driven import Driven
from bench.processes.serving import ServedDeployment
from engine.clock import Clock

ATTACKER = "bench.hostile.assaults"
READY_TIMEOUT_S = 60.0
RECOVERY_S = 30.0  # deadline for memory to shrink after an assault
MAX_KEPT = 0.1  # allowed growth of memory after that time
ASSAULT_TIMEOUT_S = 600.0
KIB = 1024


@dataclass(frozen=True, slots=True)
class AssaultRun:
    """One assault, and the gateways' private memory before the assault and some 30 s after it."""

    name: str
    ends: Mapping[str, int]  # requests by status
    before_bytes: int
    after_bytes: int

    @property
    def kept(self) -> float:
        """Returns the growth of memory, as a share; negative if memory shrank."""
        return self.after_bytes / self.before_bytes - 1


class Attacker:
    """The process of one assault, which is ready when `open` returns."""

    def __init__(self, name: str, times: int, served: ServedDeployment, grpc_port: int) -> None:
        self.name = name
        self._served = served
        address = f"127.0.0.1:{grpc_port}"
        command = [sys.executable, "-m", ATTACKER, name, str(times), served.url, address]
        self._process = Driven(name, command)

    async def open(self) -> None:
        """Starts the process and waits until its bytes are ready. Raises DrivenFailed."""
        self._process.start()
        await asyncio.to_thread(self._process.ready, READY_TIMEOUT_S)
        self._before_bytes = self._memory()

    async def attack(self) -> Mapping[str, int]:
        """Carries the assault out. Returns its requests by status. Raises DrivenFailed."""
        answer = await asyncio.to_thread(self._process.ask, "attack", timeout_s=ASSAULT_TIMEOUT_S)
        ends: Mapping[str, int] = answer["ends"]
        return ends

    async def recovered(self, ends: Mapping[str, int], clock: Clock) -> AssaultRun:
        """Ends the process and waits, up to a bound, until the gateways have freed the memory."""
        await asyncio.to_thread(self._process.close)

        async def is_back() -> bool:
            return self._memory() <= (1 + MAX_KEPT) * self._before_bytes

        await holds_within(is_back, RECOVERY_S, clock)
        return AssaultRun(self.name, ends, self._before_bytes, self._memory())

    def _memory(self) -> int:
        return private_bytes(self._served.services("gateway"))


def private_bytes(sessions: Iterable[int], proc: Path = PROC) -> int:
    """Anonymous resident memory of all processes of these sessions, from Linux's /proc.

    KV blocks are in shared memory, whose pages count from their first use on. So shared memory is
    left out.
    """
    wanted = frozenset(sessions)
    return sum(_rss_anon_bytes(path) for path in _processes(wanted, proc))


def _processes(sessions: frozenset[int], proc: Path) -> Iterator[Path]:
    for path in proc.glob("[0-9]*"):
        with suppress(OSError, IndexError):  # the process has ended
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                yield path


def _rss_anon_bytes(process: Path) -> int:
    with suppress(OSError):  # the process has ended
        for line in (process / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * KIB
    return 0
