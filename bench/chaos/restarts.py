"""Kills the controller and all gateways of a deployment at once, and starts the command again."""

import asyncio
import signal
from collections.abc import Sequence

from bench.chaos.faults import FaultFailed
from bench.chaos.plan import Fault
from bench.common.waiting import holds_within
from bench.processes.deployment import OperatedDeployment
from bench.processes.serving import ServerFailed
from engine.clock import Clock

GONE_WITHIN_S = 20.0
SETTLED_WITHIN_S = 60.0


class WholeRestarts:
    """Acts as the service manager of a deployment: waits until all processes have ended, then
    starts the command again.
    """

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def inject(self, fault: Fault, victim: str, pids: Sequence[int]) -> str:
        """Kills and restarts everything. Returns the time without any gateway. Raises
        FaultFailed.
        """
        gateways = [each.pid for each in (await self._deployment.check()).gateways]
        begun_s = self._clock.now_s()
        # Gateways first: a gateway without its controller would end its answers with an error.
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
