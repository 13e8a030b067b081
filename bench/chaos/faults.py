"""Injects faults into a deployment, one after the other, and records their results.

The possible victims of a fault are a pure function of the controller's view (`candidates`). Only
the deployment's processes get signals. Orders are sent to the deployment's controller, as an
operator sends them.
"""

import asyncio
import resource
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from bench.chaos import netns
from bench.chaos.checker import Injected
from bench.chaos.plan import OF_GATEWAYS, OF_RAY, STOPS, Fault, FaultKind, chosen, kinds_in_turn
from bench.common.background import PROC
from bench.common.waiting import POLL_EVERY_S, holds_within, pause
from bench.processes.deployment import OperatedDeployment, OrderFailed, SeenPools
from engine.clock import Clock
from engine.errors import BatonError
from engine.messages import Role

RUNS_S, STANDS_S = 0.02, 0.08  # a slow worker runs and is stopped in turn, for these times
ORDER_WITHIN_S = 20.0
GONE_WITHIN_S = 10.0
REPLACED_WITHIN_S = 90.0
CONTROLLER = "controller"  # name of the controller in the list of victims
STORE = "store"  # name of the store in the list of victims
STORE_PROGRAM = "-m deploy.store.main "
KILLS = frozenset({FaultKind.KILL, FaultKind.POOL, FaultKind.GATEWAY, FaultKind.DISK_FULL})
TOLD_WITHIN_S = 10.0
# for this share of the waiting time, only the rarest kind may replace a fault that cannot be
# injected
RAREST_FIRST = 0.5


@dataclass(frozen=True, slots=True)
class FaultVictim:
    """The victim of a fault: the process ids of its services, and its role if it is a worker."""

    name: str
    role: Role | None
    pids: Mapping[str, int]


Found = tuple[Fault, FaultVictim]


class FaultFailed(BatonError):
    """A fault could not be injected or undone."""


class Injector(Protocol):
    """Injects certain kinds of faults into a victim, and undoes the faults."""

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Injects the fault and waits until it is over. Returns a detail for the report. Raises
        FaultFailed.
        """
        ...


def candidates(kind: FaultKind, seen: SeenPools, *, held: Collection[str]) -> list[str]:
    """Returns the names of possible victims. Victims of a running fault, and the last working
    worker of a pool, are excluded.

    If the fault hits a whole pool, the victim's name is the role; another pool must exist to stand
    in. While a gateway process does not know all workers, there are no victims: this gateway might
    know only the victim.
    """
    gateways = [g for g in seen.gateways if g.works and g.members_version == seen.version]
    if not gateways or len(gateways) < len(seen.gateways):
        return []
    if kind is FaultKind.STOP_CONTROLLER:
        return [CONTROLLER] if CONTROLLER not in held else []
    if kind is FaultKind.STORE:
        return [STORE] if STORE not in held else []
    if kind in OF_RAY or kind is FaultKind.EVERYTHING:
        return [str(kind)] if seen.settled and not held else []
    if kind in OF_GATEWAYS:
        free = sorted(g.name for g in gateways if g.name not in held)
        return free if len(free) > 1 else []
    sound = {w.worker_id: w.role for w in seen.workers if w.works and w.worker_id not in held}
    if kind is FaultKind.POOL:
        if len(sound) < len(seen.workers):
            return []
        pools = sorted(
            {str(role) for role in sound.values() if role in (Role.PREFILL, Role.DECODE)}
        )
        return pools if len(pools) > 1 else []

    def spare(name: str) -> bool:
        rest = [role for other, role in sound.items() if other != name and role is not None]
        return any(role.prefills for role in rest) and any(role.decodes for role in rest)

    return sorted(name for name in sound if spare(name))


def services_of(victim: str, seen: SeenPools) -> tuple[str, ...]:
    """Returns the names of the services that a fault hits. If the victim is a pool, these are all
    its workers.
    """
    return tuple(w.worker_id for w in seen.workers if w.role == victim) or (victim,)


def pid_of(name: str, seen: SeenPools) -> int | None:
    """Returns the process id of a worker or a gateway."""
    found = [w.pid for w in seen.workers if w.worker_id == name]
    return next(iter([*found, *(g.pid for g in seen.gateways if g.name == name)]), None)


class Signals:
    """Injects faults by sending signals to processes."""

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Kills, stops or slows down processes."""
        if fault.kind is FaultKind.SLOW:
            await self._slow(pids[0], fault.seconds)
        elif fault.kind in STOPS:
            await self._stop(pids[0], fault.seconds)
        else:
            for pid in pids:
                self._send(pid, signal.SIGKILL)
            for pid in pids:
                await self._until_gone(pid)
        return ""

    async def _until_gone(self, pid: int) -> None:
        """Waits until the sockets of a killed process are closed. Raises FaultFailed.

        On busy cores the kernel frees the memory first and closes the sockets later. Until the
        sockets are closed, clients can still connect.
        """

        async def is_gone() -> bool:
            return self._deployment.is_gone(pid)

        if not await holds_within(is_gone, GONE_WITHIN_S, self._clock):
            raise FaultFailed(
                f"process {pid} was killed but still exists after {GONE_WITHIN_S:g} s"
            )

    async def _stop(self, pid: int, lasts_s: float) -> None:
        self._send(pid, signal.SIGSTOP)
        try:
            await pause(lasts_s)
        finally:
            self._deployment.signal(pid, signal.SIGCONT)

    async def _slow(self, pid: int, lasts_s: float) -> None:
        end_s = self._clock.now_s() + lasts_s
        while self._clock.now_s() < end_s:
            await self._stop(pid, STANDS_S)
            await pause(RUNS_S)

    def _send(self, pid: int, number: signal.Signals) -> None:
        if not self._deployment.signal(pid, number):
            raise FaultFailed(f"process {pid} is gone")


class Cuts:
    """Cuts the network of a worker that has its own network place."""

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Cuts off a worker, and any worker that is started in its place.

        The commands block the event loop for some milliseconds; no stream is read in this time.
        """
        try:
            with netns.cut_off(victim, pids[0]):
                await pause(fault.seconds)
        except (OSError, netns.CommandFailed) as error:
            raise FaultFailed(f"the network was not cut or not healed: {error}") from error
        return ""


class FullDisks:
    """Kills workers, and prevents their replacements from writing any file.

    Sets the kernel's limit on file sizes to 0 in the process that forks workers. A worker that
    starts meanwhile cannot write a byte to a file. Neither root nor a separate disk is needed.
    """

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Kills a worker. Returns the seconds until the deployment reported why the worker cannot
        restart.
        """
        parent = parent_of(pids[0])
        if parent is None or parent not in self._deployment.marked():
            raise FaultFailed(f"no process of the deployment forks {victim}")
        before = resource.prlimit(parent, resource.RLIMIT_FSIZE)
        resource.prlimit(parent, resource.RLIMIT_FSIZE, (0, before[1]))
        begun_s = self._clock.now_s()
        try:
            if not self._deployment.signal(pids[0], signal.SIGKILL):
                raise FaultFailed(f"process {pids[0]} is gone")

            async def is_told() -> bool:
                troubles = (await self._deployment.check()).troubles
                return any(
                    t.startswith(f"{victim} (") and " did not start: " in t for t in troubles
                )

            if not await holds_within(is_told, TOLD_WITHIN_S, self._clock):
                raise FaultFailed(f"why {victim} does not start was not told")
            told_s = self._clock.now_s() - begun_s
            await pause(fault.seconds)
        finally:
            resource.prlimit(parent, resource.RLIMIT_FSIZE, before)
        return f"told after {told_s:.1f} s"


def parent_of(pid: int, proc: Path = PROC) -> int | None:
    """Returns the process id of a process's parent; None if the process has ended."""
    try:
        status = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[1])


def store_process(deployment: OperatedDeployment) -> int | None:
    """Returns the process id of the store, which is a child of the store's keeper; None if no store
    runs.
    """
    pids = (pid for pid, line in deployment.marked().items() if STORE_PROGRAM in line)
    return next(pids, None)


class RayKills:
    """Kills processes of the deployment's own Ray."""

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Kills a process of Ray. Waits until a new one runs and the pools have their sizes
        again.
        """
        begun_s = self._clock.now_s()
        if not self._deployment.signal(pids[0], signal.SIGKILL):
            raise FaultFailed(f"{victim} is gone")

        async def is_replaced() -> bool:
            found = self._deployment.part_of_ray(victim)
            return found not in (None, *pids) and (await self._deployment.check()).settled

        if not await holds_within(is_replaced, REPLACED_WITHIN_S, self._clock):
            raise FaultFailed(f"{victim} was not replaced in {REPLACED_WITHIN_S:g} s")
        return f"replaced in {self._clock.now_s() - begun_s:.1f} s"


class Orders:
    """Injects faults by an operator's orders, which change roles."""

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Flips or drains a worker, then restores its role. Returns the seconds that the change
        took.

        The role is restored even if the worker did not change it in time. Otherwise the pools would
        have other sizes during later faults.
        """
        begun_s = self._clock.now_s()
        try:
            seen = (await self._deployment.check()).by_name.get(victim)
            if seen is None or seen.role is None:
                raise FaultFailed("its role is unknown")
            try:
                await self._order(fault.kind, victim, seen.role)
                took_s = self._clock.now_s() - begun_s
                await pause(fault.seconds)
            finally:
                await self._give_back(victim, seen.role)
                await self._until(victim, "serving", seen.role)
        except OrderFailed as error:
            raise FaultFailed(str(error)) from error
        return f"took {took_s:.1f} s"

    async def _order(self, kind: FaultKind, victim: str, role: Role) -> None:
        """Orders another role for a worker and waits until the worker has that role. Raises
        OrderFailed, FaultFailed.
        """
        if kind is FaultKind.FLIP:
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            await self._deployment.flip(victim, other)
            await self._until(victim, "serving", other)
        else:
            await self._deployment.drain(victim)
            await self._until(victim, "drained", Role.DRAINED)

    async def _give_back(self, victim: str, role: Role) -> None:
        """Orders a worker back to its old role, unless that role is already ordered. Raises
        OrderFailed.

        Retries while another worker must first replace this one, or while the controller is
        stopped.
        """

        async def is_taken() -> bool:
            worker = (await self._deployment.check()).by_name.get(victim)
            if worker is not None and worker.target is role:
                return True
            try:
                await self._deployment.flip(victim, role)
            except OrderFailed:
                return False
            return True

        if not await holds_within(is_taken, ORDER_WITHIN_S, self._clock):
            await self._deployment.flip(victim, role)

    async def _until(self, victim: str, state: str, role: Role) -> None:
        """Waits until the worker has this state and role. Raises FaultFailed."""

        async def has_come() -> bool:
            worker = (await self._deployment.check()).by_name.get(victim)
            return worker is not None and (worker.state, worker.role) == (state, role)

        if not await holds_within(has_come, ORDER_WITHIN_S, self._clock):
            worker = (await self._deployment.check()).by_name.get(victim)
            raise FaultFailed(f"not {state} as {role} in {ORDER_WITHIN_S:g} s, but {worker}")


class Director:
    """Injects the faults of a plan at their due times."""

    def __init__(
        self,
        deployment: OperatedDeployment,
        injectors: Mapping[FaultKind, Injector],
        clock: Clock,
        *,
        kinds: Sequence[FaultKind] = tuple(FaultKind),
    ) -> None:
        self._deployment = deployment
        self._injectors = injectors
        self._clock = clock
        self._kinds = kinds
        self._counts: Counter[FaultKind] = Counter()
        self._waiting: list[Fault] = []  # faults that wait for a victim
        self._held: set[str] = set()
        # process ids of killed services, until the controller has replaced them
        self._killed: dict[str, int] = {}
        self.injected: list[Injected] = []
        self.skipped: list[Fault] = []

    async def run(self, faults: Sequence[Fault], start_s: float) -> None:
        """Injects each fault at its due time.

        A fault without a possible victim waits until the next fault of its group (kills, or other
        kinds) is due. The fault that has waited longest is injected first.
        """
        kills = [fault for fault in faults if fault.kind is FaultKind.KILL]
        others = [fault for fault in faults if fault.kind is not FaultKind.KILL]
        async with asyncio.TaskGroup() as group:
            for each in (kills, others):
                group.create_task(self._run_in_turn(each, start_s, group))

    async def _run_in_turn(
        self, faults: Sequence[Fault], start_s: float, group: asyncio.TaskGroup
    ) -> None:
        dues_s = [start_s + fault.at_s for fault in faults]
        for fault, due_s, until_s in zip(faults, dues_s, [*dues_s[1:], *dues_s[-1:]], strict=True):
            await pause(due_s - self._clock.now_s())
            self._waiting.append(fault)
            found = await self._find(fault, until_s)
            self._waiting.remove(fault)
            if found is None:
                self.skipped.append(fault)
            else:
                group.create_task(self._inject(*found))

    async def _find(self, fault: Fault, until_s: float) -> Found | None:
        """Returns the fault to inject now and its victim; the victim's process ids are recorded."""
        rarest_until_s = self._clock.now_s() + RAREST_FIRST * (until_s - self._clock.now_s())
        while True:
            if fault is min(self._waiting, key=lambda waiting: waiting.at_s):
                kinds = kinds_in_turn(self._kinds, fault, self._counts)
                if self._clock.now_s() < rarest_until_s:
                    kinds = [k for k in kinds if self._counts[k] == self._counts[kinds[0]]]
                found = await self._find_kind(fault, kinds)
                if found is not None:
                    return found
            if self._clock.now_s() + POLL_EVERY_S > until_s:
                return None
            await pause(POLL_EVERY_S)

    async def _find_kind(self, fault: Fault, kinds: Sequence[FaultKind]) -> Found | None:
        seen = await self._deployment.check()
        self._killed = {n: old for n, old in self._killed.items() if pid_of(n, seen) == old}
        held = self._held | self._killed.keys()
        for kind in kinds:
            victim = chosen(fault, candidates(kind, seen, held=held))
            if victim is None:
                continue
            names = services_of(victim, seen)
            found = (self._pid_of(n, seen) for n in names)
            pids = {n: pid for n, pid in zip(names, found, strict=True) if pid is not None}
            if pids:
                self._held.update(pids)
                self._counts[kind] += 1
                worker = seen.by_name.get(victim)
                role = None if worker is None else worker.role
                return replace(fault, kind=kind), FaultVictim(victim, role, pids)
        return None

    def _pid_of(self, name: str, seen: SeenPools) -> int | None:
        if name in (CONTROLLER, FaultKind.EVERYTHING):
            return self._deployment.pid
        if name == STORE:
            return store_process(self._deployment)
        return self._deployment.part_of_ray(name) if name in OF_RAY else pid_of(name, seen)

    async def _inject(self, fault: Fault, victim: FaultVictim) -> None:
        begun_s, failure = self._clock.now_s(), None
        if fault.kind in KILLS:
            # the controller lists these processes until it detects their end
            self._killed.update(victim.pids)
        detail = ""
        try:
            pids = [*victim.pids.values()]
            detail = await self._injectors[fault.kind].inject(fault, victim.name, pids)
        except FaultFailed as error:
            failure = str(error)
        finally:
            self._held.difference_update(victim.pids)
        self.injected.append(
            Injected(
                *(fault.kind, victim.name, begun_s, self._clock.now_s()),
                detail=detail,
                failure=failure,
                role=victim.role,
            )
        )
