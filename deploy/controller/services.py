"""Starts and stops services.

Each start or stop runs in a task, and its outcome becomes an event.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from deploy.base.launcher import Launcher
from deploy.base.spec import (
    GatewayReady,
    GatewaySpec,
    ServiceReady,
    StoreReady,
    StoreSpec,
    WorkerReady,
)
from deploy.controller.plan import ControllerPlan
from deploy.controller.sessions import PoolSessions
from deploy.controller.tasks import ControllerTasks, pause
from deploy.pools.events import (
    Found,
    FoundStore,
    PoolEffect,
    PoolEvent,
    ServiceFailed,
    ServiceStarted,
    ServiceStopped,
    StartGateway,
    StartStore,
    StartWorker,
    StopGateway,
    StopStore,
    StopWorker,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from deploy.pools.machine import PoolMachine
from deploy.pools.placement import NoRoom
from deploy.pools.workers.record import WorkerState
from engine.control import Member, RetireStore
from engine.errors import ConfigError
from engine.messages import WorkerId

log = logging.getLogger(__name__)

RETRY_STOP_EVERY_S = 1.0
RETIRE_TIMEOUT_S = 5.0  # longest wait until a store reports that it is retired


class PoolServices:
    """Starts and stops services by the launcher, and keeps each running service's answer."""

    machine: PoolMachine  # set before the first effect

    def __init__(
        self,
        plan: ControllerPlan,
        *,
        launcher: Launcher,
        sessions: PoolSessions,
        tasks: ControllerTasks,
        handle: Callable[[PoolEvent], None],
    ) -> None:
        self.workers: dict[WorkerId, WorkerReady] = {}
        self.gateways: dict[str, GatewayReady] = {}
        self.stores: dict[str, StoreReady] = {}
        # None except while the controller opens.
        self.first_failure: asyncio.Future[str] | None = None
        self._plan = plan
        self._launcher = launcher
        self._sessions = sessions
        self._tasks = tasks
        self._handle = handle
        # By worker: the task of its latest start.
        self._starts: dict[WorkerId, asyncio.Task[None]] = {}

    def adopt(self, found: Mapping[str, ServiceReady]) -> None:
        """Takes over services that are already running."""
        for name, ready in found.items():
            if isinstance(ready, WorkerReady):
                self.workers[WorkerId(name)] = ready
            elif isinstance(ready, StoreReady):
                self.stores[name] = ready
            else:
                self.gateways[name] = ready

    def found(self, gateways: Collection[str]) -> Found | None:
        """Returns the services that were already running.

        Gateways that are not wanted are left out.
        """
        members = tuple(
            Member(name, ready.address, ready.version, ready.context_len)
            for name, ready in self.workers.items()
        )
        stores = tuple(
            FoundStore(name, ready.address, ready.version, ready.node)
            for name, ready in self.stores.items()
        )
        kept = tuple(name for name in self.gateways if name in gateways)
        return Found(members, kept, stores) if members or kept or stores else None

    def perform(self, effect: PoolEffect) -> None:
        """Carries out an effect that starts or stops a service, in a task."""
        match effect:
            case StartWorker(worker_id):
                self._starts[worker_id] = self._tasks.spawn(self._start_worker(effect))
            case StopWorker(worker_id, by_force):
                self._sessions.hang_up(worker_id)
                self._tasks.spawn(self._stop_worker(worker_id, by_force=by_force))
            case StartGateway(name):
                self._tasks.spawn(self._start(name, lambda: self._gateway_spec(name)))
            case StopGateway(name):
                self._sessions.hang_up(name)
                self._tasks.spawn(self._stop_gateway(name))
            case StartStore(name):
                store_spec, wanted = self._plan.store_spec, effect
                self._tasks.spawn(
                    self._start(name, lambda: store_spec(wanted, self.machine.members))
                )
            case StopStore(name, is_over):
                self._tasks.spawn(self._stop_store(name, is_over=is_over))

    # ------------------------------------------------------------ tasks

    async def _start_worker(self, wanted: StartWorker) -> None:
        worker_id, start = wanted.worker_id, wanted.start
        try:
            plan = self._plan.under(self.machine.intent)
            spec = plan.worker_spec(wanted, max(self.machine.intent.most_workers, 1))
            ready = await self._tasks.in_start_thread(self._launcher.start, spec)
            assert isinstance(ready, WorkerReady)
        except Exception as error:  # the machine retries the start after any error
            waits = self._may_have_place_later(error)
            reason = await self._clean_up(worker_id, error, is_final=not waits)
            self._handle(WorkerStartFailed(worker_id, start, reason, waits))
            return
        worker = self.machine.workers.get(worker_id)
        if worker is None or worker.start != start or worker.state is not WorkerState.STARTING:
            await self._end(worker_id, by_force=True)  # the worker was stopped during its start
            return
        self.workers[worker_id] = ready
        self._handle(WorkerStarted(worker_id, start, ready.address, ready.context_len))
        self._sessions.dial_worker(worker_id, ready.address)

    async def _stop_worker(self, worker_id: WorkerId, *, by_force: bool) -> None:
        """Ends a worker, and waits for its start, which may still make a process after the stop.

        The worker's name is free for another start only after that.
        """
        await self._end(worker_id, by_force=by_force)
        while (start := self._starts.get(worker_id)) is not None and not start.done():
            await asyncio.wait([start], timeout=RETRY_STOP_EVERY_S)
            await self._end(worker_id, by_force=True)
        self._starts.pop(worker_id, None)
        self._handle(WorkerStopped(worker_id))

    def _gateway_spec(self, name: str) -> GatewaySpec:
        return self._plan.gateway_spec(name, self.machine.members, list(self.gateways.values()))

    async def _start(self, name: str, spec_of: Callable[[], GatewaySpec | StoreSpec]) -> None:
        """Starts a gateway or a store."""
        try:
            ready = await self._tasks.in_thread(self._launcher.start, spec_of())
        except Exception as error:  # the machine tries again, as for workers
            is_final = name in self.machine.gateways
            reason = await self._clean_up(name, error, is_final=is_final)
            self._handle(ServiceFailed(name, reason))
            return
        if isinstance(ready, GatewayReady):
            self.gateways[name] = ready
            self._sessions.dial_gateway(name, ready)
            self._handle(ServiceStarted(name))
        elif isinstance(ready, StoreReady) and name in self.machine.stores:
            self.stores[name] = ready
            self._sessions.dial_store(name, ready)
            self._handle(ServiceStarted(name, ready.address))
        else:  # the store's version was removed during the start
            await self._end(name, by_force=True)

    async def _stop_gateway(self, name: str) -> None:
        await self._end(name, by_force=True)
        self._handle(ServiceStopped(name))

    async def _stop_store(self, name: str, *, is_over: bool) -> None:
        link = self._sessions.store_links.get(name)
        if is_over and link is not None and link.send(RetireStore()):
            try:
                async with asyncio.timeout(RETIRE_TIMEOUT_S):
                    await link.retired.wait()
            except TimeoutError:
                log.warning("%s did not say that it is retired: its blocks may stay on disk", name)
        self._sessions.hang_up(name)
        await self._end(name, by_force=False)
        self.stores.pop(name, None)
        self._handle(ServiceStopped(name))

    async def _end(self, name: str, *, by_force: bool) -> None:
        """Stops a service. Retries until no process of the service is left."""
        while True:
            try:
                await self._tasks.in_thread(lambda: self._launcher.stop(name, by_force=by_force))
                return
            except Exception as error:
                self._tasks.record_bug(error)
            await pause(RETRY_STOP_EVERY_S)

    def _may_have_place_later(self, error: Exception) -> bool:
        """True if a start failed because no node had room, and nodes may join later."""
        pools = self._plan.under(self.machine.intent).config.pools
        return isinstance(error, NoRoom) and pools.max_workers is not None

    async def _clean_up(self, name: str, error: Exception, *, is_final: bool) -> str:
        """Ends processes that a failed start may have left. Returns the reason of the failure."""
        reason, first = str(error) or repr(error), self.first_failure
        if is_final and first is not None and not first.done():
            first.set_result(reason)
        if not isinstance(error, ConfigError):  # after other errors a process may still run
            await self._end(name, by_force=True)
        return reason
