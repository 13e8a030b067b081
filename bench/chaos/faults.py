"""Injects faults into a deployment, one after the other, and keeps what came of each.

Whom a fault may hit is a pure function of what runs (`candidates`). Signals go to processes of the
deployment and to nobody else. A worker that was killed counts as gone until another process of its
name is there and has reported to a gateway.
"""

import asyncio
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from bench.chaos.checker import Injected
from bench.chaos.deployment import Deployment, WorkerSeen
from bench.chaos.plan import Fault, FaultKind, chosen
from bench.chaos.waiting import POLL_EVERY_S, pause
from engine.clock import Clock

RUNS_S, STANDS_S = 0.02, 0.08  # of a slow worker


class Injector(Protocol):
    """Does one kind of thing to a victim, and undoes it where that is to be done."""

    async def inject(self, fault: Fault, victim: str, pid: int) -> str:
        """Returns when it is over, with what is to be told of it. Raises FaultFailed."""
        ...


class FaultFailed(Exception):
    """A fault could not be injected."""


def candidates(
    kind: FaultKind,
    workers: Mapping[str, WorkerSeen],
    *,
    running: Collection[str],
    held: Collection[str],
    gateways: Collection[str],
) -> list[str]:
    """Who may be hit: nobody that another fault holds, nor the last of its pool that works.

    `workers` have a session, `running` have a process, `gateways` take connections.
    """
    if kind is FaultKind.GATEWAY:
        return sorted(set(gateways) - set(held)) if len(gateways) > 1 else []
    sound = {n: w.role for n, w in workers.items() if n in running and n not in held}

    def spare(name: str) -> bool:
        rest = [role for other, role in sound.items() if other != name]
        return any(role.prefills for role in rest) and any(role.decodes for role in rest)

    return sorted(name for name in sound if spare(name))


class Signals:
    """Faults that need no more than a signal."""

    def __init__(self, deployment: Deployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def inject(self, fault: Fault, victim: str, pid: int) -> str:
        """Kills, stops or slows."""
        match fault.kind:
            case FaultKind.KILL | FaultKind.GATEWAY:
                self._send(pid, signal.SIGKILL)
            case FaultKind.STOP:
                self._send(pid, signal.SIGSTOP)
                try:
                    await pause(fault.lasts_s)
                finally:
                    self._deployment.signal(pid, signal.SIGCONT)
            case FaultKind.SLOW:
                await self._slow(pid, fault.lasts_s)
            case _:
                raise FaultFailed(f"{fault.kind} is no signal")
        return ""

    async def _slow(self, pid: int, lasts_s: float) -> None:
        end_s = self._clock.now_s() + lasts_s
        try:
            while self._clock.now_s() < end_s:
                self._send(pid, signal.SIGSTOP)
                await pause(STANDS_S)
                self._send(pid, signal.SIGCONT)
                await pause(RUNS_S)
        finally:
            self._deployment.signal(pid, signal.SIGCONT)

    def _send(self, pid: int, number: signal.Signals) -> None:
        if not self._deployment.signal(pid, number):
            raise FaultFailed(f"process {pid} is gone")


class Director:
    """Carries out a plan's faults when they are due."""

    def __init__(
        self,
        deployment: Deployment,
        injectors: Mapping[FaultKind, Injector],
        clock: Clock,
    ) -> None:
        self._deployment = deployment
        self._injectors = injectors
        self._clock = clock
        self._held: set[str] = set()
        self._killed: dict[str, int] = {}  # process ids of those that are to come back as others
        self.injected: list[Injected] = []
        self.skipped: list[Fault] = []

    async def run(self, faults: Sequence[Fault], start_s: float) -> None:
        """Injects each when it is due; one that nobody may be hit by then waits for the next."""
        dues_s = [start_s + fault.at_s for fault in faults]
        async with asyncio.TaskGroup() as group:
            for fault, due_s, until_s in zip(
                faults, dues_s, [*dues_s[1:], dues_s[-1]], strict=True
            ):
                await pause(due_s - self._clock.now_s())
                found = await self._find(fault, until_s)
                if found is None:
                    self.skipped.append(fault)
                else:
                    group.create_task(self._inject(fault, *found))

    async def _find(self, fault: Fault, until_s: float) -> tuple[str, int] | None:
        kind = "gateway" if fault.kind is FaultKind.GATEWAY else "worker"
        while True:
            workers = await self._deployment.workers()
            running, gateways = (self._deployment.pids(k) for k in ("worker", "gateway"))
            pids = running | gateways
            all_listen = self._deployment.num_listening() == len(gateways)
            self._killed = {n: pid for n, pid in self._killed.items() if pids.get(n, pid) == pid}
            eligible = candidates(
                fault.kind,
                workers,
                running=running,
                held=self._held | self._killed.keys(),
                gateways=gateways if all_listen else (),
            )
            if (victim := chosen(fault, eligible)) is not None:
                return victim, (gateways if kind == "gateway" else running)[victim]
            if self._clock.now_s() + POLL_EVERY_S > until_s:
                return None
            await pause(POLL_EVERY_S)

    async def _inject(self, fault: Fault, victim: str, pid: int) -> None:
        self._held.add(victim)
        begun_s = self._clock.now_s()
        if fault.kind in (FaultKind.KILL, FaultKind.GATEWAY):
            self._killed[victim] = pid
        try:
            detail = await self._injectors[fault.kind].inject(fault, victim, pid)
        except FaultFailed as error:
            detail = f"failed: {error}"
        finally:
            self._held.discard(victim)
        self.injected.append(Injected(fault.kind, victim, begun_s, self._clock.now_s(), detail))
