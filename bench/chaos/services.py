"""Kills of a deployment's store, checks of the store's content, and restarts of all processes.

A store consists of two processes: the keeper, which the controller watches, and the keeper's child,
which serves requests. If the child dies, the keeper starts a new child, which reuses the blocks in
memory. If the keeper dies, its child ends too. The controller then starts a new keeper, whose store
has only the blocks on disk.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from bench.chaos.faults import FaultFailed, parent_of, store_process
from bench.chaos.plan import Fault
from bench.common.waiting import holds_within
from bench.lab.store.parts import num_slots, read_store_samples
from bench.processes.deployment import OperatedDeployment, ServerFailed
from engine.clock import Clock
from engine.errors import BatonError

REPLACED_WITHIN_S = 60.0
IDLE_WITHIN_S = 20.0


class StoreUnseen(BatonError):
    """The deployment should have a store, but its gateways do not know any."""


class StoreKills:
    """Kills the store's process and the store's keeper in turn."""

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock
        self._num = 0

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Kills one process. Returns its name, and the time until a new process ran. Raises
        FaultFailed.
        """
        keeper = parent_of(pids[0])
        if keeper is None or keeper not in self._deployment.marked():
            raise FaultFailed("the store has no keeper")
        hit, of_keeper = (keeper, True) if self._num % 2 else (pids[0], False)
        self._num += 1
        begun_s = self._clock.now_s()
        if not self._deployment.signal(hit, signal.SIGKILL):
            raise FaultFailed(f"process {hit} is gone")

        async def is_replaced() -> bool:
            process = store_process(self._deployment)
            if process in (None, *pids) or not self._deployment.is_gone(pids[0]):
                return False
            assert process is not None
            return (parent_of(process) != keeper) == of_keeper

        what = "keeper" if of_keeper else "process"
        if not await holds_within(is_replaced, REPLACED_WITHIN_S, self._clock):
            raise FaultFailed(f"the store's {what} was not replaced in {REPLACED_WITHIN_S:g} s")
        return f"{what} replaced in {self._clock.now_s() - begun_s:.1f} s"


@dataclass(frozen=True, slots=True)
class StoreLeft:
    """The blocks, leaked blocks and offers of a store at the end of a run."""

    num_blocks: int = 0  # blocks in memory
    leaked_blocks: int = 0  # slots that are neither free nor cached, or that are missing
    leaked_leases: int = 0
    num_offers: int = 0  # prefixes that the store leased since its process started


def left_of(samples: Mapping[str, float], slots: float) -> StoreLeft:
    """Computes the content of an idle store with `slots` slots from its metric samples. Pure."""
    resting = samples.get("slots:free", 0.0) + samples.get("slots:cached", 0.0)
    return StoreLeft(
        num_blocks=int(samples.get("slots:cached", 0.0)),
        leaked_blocks=int(abs(slots - resting)),
        leaked_leases=int(samples.get("open_leases", 0.0)),
        num_offers=int(samples.get("prefix_offers_total:held", 0.0)),
    )


async def slots_of_store(session: aiohttp.ClientSession, url: str, clock: Clock) -> float:
    """Waits until a gateway knows the store. Returns the number of the store's slots. Raises
    StoreUnseen.
    """
    found = 0.0

    async def is_known() -> bool:
        nonlocal found
        found = num_slots(await read_store_samples(session, url))
        return found > 0

    if not await holds_within(is_known, IDLE_WITHIN_S, clock):
        raise StoreUnseen(f"no gateway knew the store in {IDLE_WITHIN_S:g} s")
    return found


async def idle_store(
    session: aiohttp.ClientSession, url: str, slots: float, clock: Clock
) -> StoreLeft:
    """Waits until the store is idle and has no open lease. Returns its content."""
    left = StoreLeft()

    async def is_idle() -> bool:
        nonlocal left
        left = left_of(await read_store_samples(session, url), slots)
        return not left.leaked_blocks and not left.leaked_leases

    await holds_within(is_idle, IDLE_WITHIN_S, clock)
    return left


GONE_WITHIN_S = 20.0
SETTLED_WITHIN_S = 60.0


class WholeRestarts:
    """Acts as a service manager: waits until all processes of a deployment have ended, then starts
    the command again.
    """

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Kills all processes and starts the command again. Returns the seconds without any
        gateway. Raises FaultFailed.
        """
        gateways = [each.pid for each in (await self._deployment.check()).gateways]
        begun_s = self._clock.now_s()
        # Gateways are killed first: a gateway without its controller would send errors to its
        # clients.
        for pid in (*gateways, *pids):
            if pid is None or not self._deployment.signal(pid, signal.SIGKILL):
                raise FaultFailed(f"process {pid} is gone")

        async def is_gone() -> bool:
            left = self._deployment.marked()
            return all(self._deployment.is_gone(pid) for pid in left)

        if not await holds_within(is_gone, GONE_WITHIN_S, self._clock):
            left = ", ".join(self._deployment.marked().values())
            raise FaultFailed(f"still there after {GONE_WITHIN_S:g} s: {left}")
        try:
            await asyncio.to_thread(self._deployment.start_again)
        except ServerFailed as error:
            raise FaultFailed(f"it did not start again: {error}") from error
        served_s = self._clock.now_s() - begun_s

        async def is_settled() -> bool:
            return (await self._deployment.check()).settled

        if not await holds_within(is_settled, SETTLED_WITHIN_S, self._clock):
            raise FaultFailed("the pools did not become as ordered")
        return f"served again after {served_s:.1f} s"
