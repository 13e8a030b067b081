"""The controller of the pools: a launcher and sessions, with the pool machine between them.

The controller runs on one asyncio loop, in the process of `baton serve` or in a Ray actor. The
controller may be killed at any time, and another controller takes over. The new controller finds
workers and gateways through the launcher. From the gateways it gets the last members and the
operator's intent, and from the workers their roles. Requests never wait for the controller.
"""

import asyncio
from collections.abc import Callable, Mapping

from prometheus_client.core import Metric

from deploy.base.launcher import Launcher
from deploy.base.spec import READY_TIMEOUT_S, GatewayReady, StoreReady, WorkerReady
from deploy.controller.intents import IntentStore, IntentWriter, declared_by, latest
from deploy.controller.links import HANDSHAKE_TIMEOUT_S
from deploy.controller.metrics import controller_families
from deploy.controller.plan import ControllerPlan
from deploy.controller.reports import cluster_report
from deploy.controller.services import PoolServices
from deploy.controller.sessions import PoolSessions
from deploy.controller.tasks import ControllerTasks, pause
from deploy.fetching.cache import FETCH_TIMEOUT_S
from deploy.logs.reading import LogPieces, LogsQuery
from deploy.pools.events import (
    Died,
    GatewaySilent,
    NodesSeen,
    PartsSeen,
    PoolEffect,
    PoolEvent,
    PoolTick,
    Publish,
    RoomSeen,
    SetWorkerRole,
    StoresSeen,
)
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Order, SetPlanner
from deploy.pools.planning import Planning, rules_of
from deploy.pools.state import MAX_WORKERS, PoolLimits
from engine.clock import Clock, unix_time_s
from engine.config import Config, DeviceKind, PoolsConfig, WorkerConfig
from engine.control import ClusterReport, ControllerReport, HistoryStep, Intent, Members, Pools
from engine.errors import ConfigError
from engine.messages import WorkerId
from engine.net.trust import Secret
from router.gateway.metrics.families import encode_metrics

# Time limit of an opening. It is long, because first workers and then gateways start, each with its
# own limit.
OPEN_TIMEOUT_S = FETCH_TIMEOUT_S + 3 * READY_TIMEOUT_S
WATCH_EVERY_S = 1.0
SETTLE_EVERY_S = 0.05


class PoolController:
    """Gives the pools their wanted size, from `open` to `close`. The caller owns the launcher."""

    def __init__(
        self,
        plan: ControllerPlan,
        *,
        launcher: Launcher,
        clock: Clock,
        report: Callable[[str], None],
        store: IntentStore | None = None,
    ) -> None:
        """`store` keeps the operators' orders. Without a store, only gateways keep the orders."""
        self._plan = plan
        self._launcher = launcher
        self._clock = clock
        self._report = report
        self._tasks = ControllerTasks(report)
        self.sessions = PoolSessions(
            Secret(plan.token), clock=clock, tasks=self._tasks, handle=self._handle
        )
        self._intents = IntentWriter(
            store,
            declared=declared_by(plan),
            tasks=self._tasks,
            report=report,
            handle=self._handle,
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
        self.stores: Mapping[str, StoreReady] = self._services.stores
        self._health: Mapping[str, bool] = {}  # by program that services depend on: True if alive
        # Arguments of the latest call of `ask_for`.
        self._asked_for: tuple[int, Pools] | None = None
        self._is_closing = False
        self._is_restored = False  # True if the pools started with stored orders
        self._epoch_s = unix_time_s() - clock.now_s()  # the Unix time at which the clock was 0
        self.admin_url = ""  # URL of the operator's API; empty until it listens

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Finds running services and starts the missing ones. Returns once clients are served.

        Raises ConfigError if a service fails to start while the deployment starts for the first
        time.
        """
        pools, num_gpus = self._plan.config.pools, self._plan.num_gpus
        room = await self._tasks.in_thread(_find_room, self._launcher, num_gpus, pools)
        found = await self._tasks.in_thread(self._launcher.running)
        self._services.adopt(found)
        known = await self._known(room)
        config, is_first = self._plan.config, not found
        first = Intent(self._plan.first_versions, config.planner.mode)
        self.machine = PoolMachine(
            first if known is None else known.intent,
            limits=_limits(self._plan, room),
            gateways=self._plan.gateways,
            version=0 if known is None else known.version,
            is_guess=bool(found) and known is None,
        )
        self.planning = Planning(
            self.machine,
            rules_of(config),
            order=self._handle,
            max_workers=config.pools.max_workers,
            took_over=not is_first,
        )
        self._services.machine = self.machine
        self.sessions.attach(self.machine)
        self._intents.record(self.machine.members)
        self._tasks.spawn(self._intents.run())
        self._adopt_found()
        if is_first:
            self._services.first_failure = asyncio.get_running_loop().create_future()
            _check_room(self.machine)
            self._report(f"starting {self.machine.intent.num_wanted} workers")
        nodes = await self._tasks.in_thread(self._launcher.nodes)
        self._handle(NodesSeen(tuple(nodes)))
        self._handle(PoolTick())
        self._tasks.spawn(self._watch())
        self._tasks.spawn(self._watch_room())
        self._tasks.spawn(self._send_reports())
        if is_first:
            await self._until_begun()
        self._services.first_failure = None

    async def _known(self, room: RoomSeen) -> Members | None:
        """Returns the newest members that are known to a gateway or to the store of orders."""
        heard = await self.sessions.adopt(self.gateways)
        kept = await self._intents.read()
        known = latest(kept, heard)
        if known is None or known == heard:
            return heard
        wanted = known.intent.num_wanted
        most = self._plan.under(known.intent).config.pools.max_workers or room.max_workers
        if wanted > most:
            self._report(f"stored orders for {wanted} workers are dropped: {most} fit: {room.why}")
            return heard
        names = ", ".join(version.name for version in known.intent.versions)
        self._report(f"continues with stored orders: versions {names}, {wanted} workers")
        self._is_restored = True
        return known

    async def close(self) -> None:
        """Ends all sessions. Workers, gateways and stores keep running."""
        self._is_closing = True
        await self._tasks.close(HANDSHAKE_TIMEOUT_S)

    @property
    def stored_own(self) -> bool:
        """True if the stored record is this controller's initial intent.

        False if the record contains earlier orders.
        """
        return self._intents.has_replaced and not self._is_restored

    def _adopt_found(self) -> None:
        """Reports the found services to the machine, and dials their workers and stores."""
        if (found := self._services.found(self.machine.gateways)) is not None:
            self._handle(found)
        for name, link in self.sessions.gateway_links.items():
            if not link.is_open:
                self._handle(GatewaySilent(name, "it does not answer"))
        for worker_id, ready in self.workers.items():
            self.sessions.dial_worker(worker_id, ready.address)
        for name, store in self.stores.items():
            self.sessions.dial_store(name, store)

    async def _until_begun(self) -> None:
        failure = self._services.first_failure
        assert failure is not None
        while not self.machine.has_begun:
            await asyncio.wait([failure], timeout=SETTLE_EVERY_S)
            if failure.done():
                raise ConfigError(failure.result() + self._hint())

    def _hint(self) -> str:
        """Returns a hint for errors: how to start without stored orders.

        Empty if no stored orders are in use.
        """
        if not self._is_restored:
            return ""
        return f" (with orders stored in {self._intents.store}; remove it to start as declared)"

    # ------------------------------------------------------------ orders and queries

    def order(self, order: Order) -> None:
        """Carries out an order. If the order is refused, raises OrderRefused with the reason."""
        if isinstance(order, SetPlanner):
            self.planning.check(order.mode)
        self._handle(order)

    @property
    def config(self) -> Config:
        """Returns the configuration in force: settings at the start, with operators' changes."""
        return self._plan.under(self.machine.intent).config

    def device_of(self, worker: WorkerConfig) -> DeviceKind:
        """Returns the kind of device on which workers with this configuration run.

        Raises ConfigError.
        """
        return self._plan.device_of(worker)

    @property
    def counters(self) -> dict[str, int]:
        """Returns how often each kind of trouble has happened.

        Kinds that never happened are omitted.
        """
        found = {
            **self.machine.counters,
            **self._launcher.counters(),
            **self._intents.counters,
        }
        found["controller bugs"] = self._tasks.num_bugs
        return {name: number for name, number in found.items() if number}

    async def logs(self, query: LogsQuery) -> LogPieces:
        """Returns the log lines that services kept and that the query selects."""
        folder = self._plan.log_folder
        if folder is None:
            return LogPieces({}, [])
        return await self._tasks.in_thread(self._launcher.read_logs, folder, query)

    def metrics(self) -> list[Metric]:
        """Returns the present values of all metrics."""
        return list(
            controller_families(
                self.machine,
                self.planning,
                counters=self.counters,
                health=self._health,
                price_per_hour=self.config.pools.price_per_hour,
                stores=self.sessions.store_reports(),
            )
        )

    @property
    def url(self) -> str:
        """Returns the URL for clients; empty before the first gateway has started."""
        return next((ready.url for ready in self.gateways.values()), "")

    # ------------------------------------------------------------ events and effects

    def _handle(self, event: PoolEvent) -> None:
        if self._is_closing:
            return
        for effect in self.machine.handle(event, self._clock.now_s()):
            self._perform(effect)

    def _perform(self, effect: PoolEffect) -> None:
        match effect:
            case SetWorkerRole(worker_id, role):
                self.sessions.set_role(worker_id, role)
            case Publish(members):
                self.sessions.publish(members)
                self._intents.record(members)
            case HistoryStep():
                self._report(str(effect))
            case _:
                self._services.perform(effect)

    # ------------------------------------------------------------ time and room

    async def _watch(self) -> None:
        """Every second, checks for ended services and sends a tick to the machine.

        Survives any bug.
        """
        while True:
            await pause(WATCH_EVERY_S)
            try:
                for name, how in (await self._tasks.in_thread(self._launcher.dead)).items():
                    self.sessions.hang_up(name)
                    self._handle(Died(name, how))
                self._handle(PoolTick())
                self._plan_pools()
            except Exception as error:
                self._tasks.record_bug(error)

    async def _watch_room(self) -> None:
        """Requests nodes from the launcher, and watches for nodes that join or leave.

        A cluster may take long to answer, but only this task waits for the answer.
        """
        while True:
            await pause(WATCH_EVERY_S)
            try:
                workers = self.machine.workers
                # Keep all places until all found workers have reported their roles.
                if all(worker.target is not None for worker in workers.values()):
                    names = [str(worker_id) for worker_id in workers]
                    await self._tasks.in_thread(self._launcher.keep_places, names)
                nodes = tuple(await self._tasks.in_thread(self._launcher.nodes))
                self._handle(NodesSeen(nodes))
                await self._ask_for_room()
                pools, num_gpus = self.config.pools, self._plan.num_gpus
                room = await self._tasks.in_thread(_find_room, self._launcher, num_gpus, pools)
                limits = self.machine.limits
                if room != RoomSeen(limits.max_workers, limits.why_no_more):
                    self._handle(room)
            except Exception as error:
                self._tasks.record_bug(error)

    async def _send_reports(self) -> None:
        """Every second, sends metrics and the state of the pools to all gateways.

        Survives any bug.
        """
        while True:
            try:
                self._health = await self._tasks.in_thread(self._launcher.health)
                self._handle(PartsSeen(self._health))
                self._handle(StoresSeen(self.sessions.store_troubles()))
                urls = tuple(ready.url for ready in self.gateways.values())
                report = ControllerReport(encode_metrics(self.metrics()), urls)
                self.sessions.send_reports(report, self._cluster_report())
            except Exception as error:
                self._tasks.record_bug(error)
            await pause(WATCH_EVERY_S)

    def _cluster_report(self) -> ClusterReport:
        return cluster_report(
            self.machine,
            self.planning,
            workers=self.workers,
            gateways=self.gateways,
            counters=self.counters,
            admin_url=self.admin_url,
            epoch_s=self._epoch_s,
        )

    async def _ask_for_room(self) -> None:
        """Requests nodes from the launcher if the planner wants another number of workers."""
        if self.planning.room_for is None:
            return
        wanted = self.planning.room_for, self.machine.intent.all_pools
        if wanted != self._asked_for:
            await self._tasks.in_thread(self._launcher.ask_for, *wanted, self._plan.num_gpus)
            self._asked_for = wanted

    def _plan_pools(self) -> None:
        config = self.config
        self.planning.follow(rules_of(config), config.pools.max_workers)
        reports = self.sessions.reports(self.machine.gateways)
        infos, now_s = self.sessions.infos(), self._clock.now_s()
        for decision in self.planning.tick(reports, infos, now_s):
            why = "; ".join(decision.reasons)
            self._report(f"planner ({decision.mode}): {decision}, because {why}")


def _find_room(launcher: Launcher, num_gpus: int, pools: PoolsConfig) -> RoomSeen:
    """Returns the limit of workers: the configured limit, or else the launcher's room."""
    if pools.max_workers is not None:
        return RoomSeen(pools.max_workers, MAX_WORKERS)
    room = launcher.room(num_gpus)
    return RoomSeen(room, f"{launcher.scarce(num_gpus)} ({MAX_WORKERS})")


def _limits(plan: ControllerPlan, room: RoomSeen) -> PoolLimits:
    config = plan.config
    idle = {name: model.idle_s for name, model in config.models.items()}
    return PoolLimits(
        room.max_workers,
        room.why,
        config.pools,
        config.update,
        idle_s={name: idle_s for name, idle_s in idle.items() if idle_s is not None},
        gateways_share_socket=plan.ports is not None,
        has_stores=config.store.is_on,
    )


def _check_room(machine: PoolMachine) -> None:
    wanted, limits = machine.intent.num_wanted, machine.limits
    if wanted > limits.max_workers:
        raise ConfigError(
            f"{wanted} workers are more than the {limits.max_workers} there can be: "
            f"{limits.why_no_more}"
        )
