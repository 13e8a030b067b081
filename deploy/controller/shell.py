"""The shell of the pools: sessions, a launcher, and the machine between them.

One asyncio loop, in the process of `baton serve` or in a Ray actor. The controller may
be killed at any time, and another one goes on. The new one finds workers and gateways through the
launcher. It asks the gateways for the last members and the operator's intent, and the workers for
their roles. Requests never wait for the controller.
"""

import asyncio
from collections.abc import Callable, Mapping

from deploy.controller.links import HANDSHAKE_TIMEOUT_S
from deploy.controller.plan import ControllerPlan
from deploy.controller.services import PoolServices
from deploy.controller.sessions import PoolSessions
from deploy.controller.tasks import ControllerTasks, pause
from deploy.launcher import Launcher
from deploy.model_source import FETCH_TIMEOUT_S
from deploy.pools.effects import (
    HistoryStep,
    PoolEffect,
    Publish,
    SetWorkerRole,
    StartGateway,
    StartWorker,
    StopGateway,
    StopWorker,
)
from deploy.pools.events import Died, Found, GatewayUnheard, PoolEvent, PoolTick, RoomSeen
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Order, SetPlanner
from deploy.pools.planning import Planning, rules_of
from deploy.pools.wanted import PoolLimits
from deploy.services.spec import READY_TIMEOUT_S, GatewayReady, WorkerReady
from engine.clock import Clock
from engine.control import Intent, Member, Pools
from engine.errors import ConfigError
from engine.messages import WorkerId
from engine.net.trust import Secret

# Each start has deadlines of its own: workers start first, then gateways.
OPEN_TIMEOUT_S = FETCH_TIMEOUT_S + 3 * READY_TIMEOUT_S
WATCH_EVERY_S = 1.0
SETTLE_EVERY_S = 0.05


class PoolController:
    """Gives the pools their wanted size, from open to close. The launcher belongs to the caller."""

    def __init__(
        self,
        plan: ControllerPlan,
        *,
        launcher: Launcher,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._clock = clock
        self._report = report
        self._tasks = ControllerTasks(report)
        self.sessions = PoolSessions(
            Secret(plan.token), clock=clock, tasks=self._tasks, handle=self._handle
        )
        self._services = PoolServices(
            plan,
            launcher=launcher,
            sessions=self.sessions,
            tasks=self._tasks,
            handle=self._handle,
        )
        self.workers: Mapping[WorkerId, WorkerReady] = self._services.workers
        self.gateways: Mapping[str, GatewayReady] = self._services.gateways
        self._asked_for: tuple[int, Pools] | None = None  # room, of this launcher
        self._is_closing = False

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Finds what runs and starts the rest. Returns once clients are served.

        Raises ConfigError if a service cannot be started at all on a first start.
        """
        room = await self._tasks.in_thread(self._look_for_room)
        found = await self._tasks.in_thread(self._launcher.running)
        self._services.adopt(found)
        heard = await self.sessions.adopt(self.gateways)
        config, is_first = self._plan.config, not found
        first = Intent((self._plan.first_version,), config.planner.mode)
        self.machine = PoolMachine(
            first if heard is None else heard.intent,
            limits=self._limits(room),
            gateways=self._plan.gateways,
            version=0 if heard is None else heard.version,
            is_guess=bool(found) and heard is None,
        )
        self.planning = Planning(
            self.machine,
            rules_of(config),
            order=self._handle,
            max_workers=config.pools.max_workers,
            took_over=not is_first,
        )
        self._services.machine = self.machine
        self.sessions.begin(self.machine)
        self._tell_found()
        if is_first:
            self._services.first_failure = asyncio.get_running_loop().create_future()
            self._check_room()
            self._report(f"starting {self.machine.intent.pools.total} workers")
        self._handle(PoolTick())
        self._tasks.spawn(self._watch())
        self._tasks.spawn(self._watch_room())
        if is_first:
            await self._until_begun()
        self._services.first_failure = None

    async def close(self) -> None:
        """Ends the sessions. Workers and gateways go on."""
        self._is_closing = True
        await self._tasks.close(HANDSHAKE_TIMEOUT_S)

    def _limits(self, room: RoomSeen) -> PoolLimits:
        pools = self._plan.config.pools
        return PoolLimits(
            max_workers=room.max_workers,
            why_no_more=room.why,
            drain_timeout_s=pools.drain_timeout_s,
            steady_s=pools.steady_s,
            update_timeout_s=pools.update_timeout_s,
        )

    def _tell_found(self) -> None:
        """Reports to the machine what ran already, and dials the workers."""
        members = tuple(
            Member(name, ready.address, ready.version, ready.context_len)
            for name, ready in self.workers.items()
        )
        gateways = tuple(name for name in self.gateways if name in self.machine.gateways)
        if members or gateways:
            self._handle(Found(members, gateways))
        for name, link in self.sessions.gateway_links.items():
            if not link.is_open:
                self._handle(GatewayUnheard(name, "it does not answer"))
        for worker_id, ready in self.workers.items():
            self.sessions.dial_worker(worker_id, ready.address)

    def _check_room(self) -> None:
        wanted, limits = self.machine.intent.pools.total, self.machine.limits
        if wanted > limits.max_workers:
            raise ConfigError(
                f"{wanted} workers are more than the {limits.max_workers} there can be: "
                f"{limits.why_no_more}"
            )

    async def _until_begun(self) -> None:
        failure = self._services.first_failure
        assert failure is not None
        while not self.machine.has_begun:
            await asyncio.wait([failure], timeout=SETTLE_EVERY_S)
            if failure.done():
                raise ConfigError(failure.result())

    # ------------------------------------------------------------ orders and questions

    def order(self, order: Order) -> None:
        """Carries out an order. Raises OrderRefused with the reason."""
        if isinstance(order, SetPlanner):
            self.planning.check(order.mode)
        self._handle(order)

    @property
    def counters(self) -> dict[str, int]:
        """Returns how often each kind of trouble happened; kinds with count 0 are omitted."""
        found = {**self.machine.counters, **self._launcher.counters()}
        found["controller bugs"] = self._tasks.num_bugs
        return {name: number for name, number in found.items() if number}

    @property
    def url(self) -> str:
        """Returns where clients send requests; empty before the first gateway has started."""
        return next((ready.url for ready in self.gateways.values()), "")

    # ------------------------------------------------------------ events and effects

    def _handle(self, event: PoolEvent) -> None:
        if self._is_closing:
            return
        for effect in self.machine.handle(event, self._clock.now_s()):
            self._perform(effect)

    def _perform(self, effect: PoolEffect) -> None:
        match effect:
            case StartWorker():
                self._services.start_worker(effect)
            case StopWorker(worker_id, by_force):
                self._services.stop_worker(worker_id, by_force=by_force)
            case SetWorkerRole(worker_id, role):
                self.sessions.set_role(worker_id, role)
            case StartGateway(name):
                self._services.start_gateway(name)
            case StopGateway(name):
                self._services.stop_gateway(name)
            case Publish(members):
                self.sessions.publish(members)
            case HistoryStep():
                self._report(str(effect))

    # ------------------------------------------------------------ time and room

    async def _watch(self) -> None:
        """Looks every second for services that ended, and lets time pass. Survives any bug."""
        while True:
            await pause(WATCH_EVERY_S)
            try:
                for name, how in (await self._tasks.in_thread(self._launcher.dead)).items():
                    self.sessions.hang_up(name)
                    self._handle(Died(name, how))
                self._handle(PoolTick())
                self._plan_pools()
            except Exception as error:
                self._tasks.note_bug(error)

    async def _watch_room(self) -> None:
        """Asks for nodes, and looks for nodes that come and go.

        A cluster may give no answer for long. Only this task waits for it.
        """
        while True:
            await pause(WATCH_EVERY_S)
            try:
                workers = self.machine.workers
                # Before all found workers have told their roles, no place may be given up.
                if all(worker.target is not None for worker in workers.values()):
                    names = [str(worker_id) for worker_id in workers]
                    await self._tasks.in_thread(self._launcher.keep_places, names)
                await self._ask_for_room()
                room = await self._tasks.in_thread(self._look_for_room)
                limits = self.machine.limits
                if room != RoomSeen(limits.max_workers, limits.why_no_more):
                    self._handle(room)
            except Exception as error:
                self._tasks.note_bug(error)

    def _look_for_room(self) -> RoomSeen:
        """Returns the configured limit, or the launcher's."""
        pools = self._plan.config.pools
        if pools.max_workers is not None:
            return RoomSeen(pools.max_workers, "see pools.max_workers")
        room = self._launcher.room(pools.num_gpus)
        return RoomSeen(room, f"{self._launcher.scarce(pools.num_gpus)} (see pools.max_workers)")

    async def _ask_for_room(self) -> None:
        """Asks the launcher for nodes if the planner's wish has changed."""
        if self.planning.room_for is None:
            return
        wanted = self.planning.room_for, self.machine.intent.pools
        if wanted != self._asked_for:
            num_gpus = self._plan.config.pools.num_gpus
            await self._tasks.in_thread(self._launcher.ask_for, *wanted, num_gpus)
            self._asked_for = wanted

    def _plan_pools(self) -> None:
        reports = self.sessions.reports(self.machine.gateways)
        decision = self.planning.tick(reports, self.sessions.infos(), self._clock.now_s())
        if decision is not None:
            why = "; ".join(decision.reasons)
            self._report(f"planner ({decision.mode}): {decision}, because {why}")
