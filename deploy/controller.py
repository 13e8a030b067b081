"""The shell of the pools: sessions, a launcher, and the machine between them.

One asyncio loop. It runs in the process of `baton serve`, or in an actor of a Ray cluster; there it
may be killed at any time, and another one goes on: it finds workers and gateways through the
launcher, asks the gateways for the last members and what the operator wants, and the workers for
their roles. Requests never wait for it.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from deploy.admin.schema import BlockEventsAnswer
from deploy.launcher import Launcher
from deploy.links import (
    ANSWER_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    RETRY_EVERY_S,
    GatewayLink,
    WorkerLink,
    keep,
)
from deploy.model_source import FETCH_TIMEOUT_S, name_of
from deploy.pools.effects import (
    PoolEffect,
    Publish,
    SetWorkerRole,
    StartGateway,
    StartWorker,
    StopGateway,
    StopWorker,
    Tell,
)
from deploy.pools.events import (
    Died,
    Found,
    GatewayFailed,
    GatewayHeard,
    GatewaySeen,
    GatewayStarted,
    GatewayStopped,
    GatewayUnheard,
    Overtaken,
    PoolEvent,
    PoolTick,
    RoomSeen,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from deploy.pools.formats import config_of
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Order, OrderRefused, SetPlanner
from deploy.pools.placement import NoPlace
from deploy.pools.planning import Planning, rules_of
from deploy.pools.wanted import PoolLimits
from deploy.pools.workers.record import WorkerState
from deploy.processes import (
    READY_TIMEOUT_S,
    GatewayReady,
    GatewaySpec,
    WorkerReady,
    WorkerSpec,
)
from engine.clock import Clock
from engine.config import Config
from engine.control import (
    FIRST_VERSION,
    GatewayReport,
    Intent,
    Member,
    Members,
    Pools,
    RequestInfo,
    Version,
)
from engine.errors import ConfigError
from engine.messages import GatewayId, WorkerId
from engine.net.curve import Channel, client_keys, server_keys
from engine.net.trust import Secret

log = logging.getLogger(__name__)

# Each start that is waited for has deadlines of its own; workers are first, then gateways.
OPEN_TIMEOUT_S = FETCH_TIMEOUT_S + 3 * READY_TIMEOUT_S
WATCH_EVERY_S = 1.0
MAX_THREADS = 64  # calls of the launcher at once, each over in minutes
MAX_STARTS = 256  # of workers at once: these may take hours, where a model is fetched
SETTLE_EVERY_S = 0.05

T = TypeVar("T")
Report = Callable[[str], None]


class ControllerPlan(msgspec.Struct, frozen=True):
    """All that a controller is started with; as JSON it starts one again."""

    model: str  # as `model_source` reads it
    config: Config
    pools: Pools  # at the first start: afterwards what the operator ordered
    token: str
    cores: int  # of the machine where workers run, for their threads
    siblings: str | None = None  # a directory, where several gateways share a port
    memory_bytes: int | None = None  # available for workers at the start; None: each looks itself
    log_level: str = "warning"

    @property
    def first_version(self) -> Version:
        """What is served until the operator says otherwise."""
        name = self.config.gateway.model_name or name_of(self.model)
        return Version(FIRST_VERSION, self.model, name, self.config.worker, self.pools)

    @property
    def gateways(self) -> list[str]:
        """Their names."""
        num_processes = self.config.gateway.processes
        if num_processes == 1:
            return ["gateway"]
        return [f"gateway-{i}" for i in range(num_processes)]


class PoolController:
    """Makes the pools what is wanted, from open to close; the launcher is somebody else's."""

    def __init__(
        self,
        plan: ControllerPlan,
        *,
        launcher: Launcher,
        clock: Clock,
        report: Report,
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._clock = clock
        self._report = report
        self.controller_id = GatewayId(f"controller-{secrets.token_hex(6)}")
        self.workers: dict[WorkerId, WorkerReady] = {}
        self.gateways: dict[str, GatewayReady] = {}
        self.links: dict[WorkerId, WorkerLink] = {}
        self.gateway_links: dict[str, GatewayLink] = {}
        self._asked_for: tuple[int, Pools] | None = None  # of this launcher; None: nothing yet
        self._dialling: dict[str, asyncio.Task[None]] = {}  # by worker or gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: dict[WorkerId, asyncio.Task[None]] = {}  # the latest one of each name
        self._first_failure: asyncio.Future[str] | None = None  # of a start, while opening
        self._is_adopting = True  # gateways are asked what they know, and told nothing yet
        self._is_closing = False
        self._num_bugs = 0  # of this controller, that it has got over
        self._threads = ThreadPoolExecutor(MAX_THREADS, "launch")  # none is there before its use
        self._start_threads = ThreadPoolExecutor(MAX_STARTS, "start")

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Finds what runs, and starts what does not. Returns when all serves that has room.

        Raises ConfigError if something cannot be started at all, the first time.
        """
        self._loop = asyncio.get_running_loop()
        config = self._plan.config
        room = await self._in_thread(self._look_for_room)
        limits = PoolLimits(
            max_workers=room.max_workers,
            why_no_more=room.why,
            drain_timeout_s=config.pools.drain_timeout_s,
            steady_s=config.pools.steady_s,
            update_timeout_s=config.pools.update_timeout_s,
        )
        found = await self._in_thread(self._launcher.running)
        heard = await self._adopt_gateways(found)
        first = Intent((self._plan.first_version,), config.planner.mode)
        intent = first if heard is None else heard.intent
        self.machine = PoolMachine(
            intent,
            limits=limits,
            gateways=self._plan.gateways,
            version=0 if heard is None else heard.version,
            is_guess=bool(found) and heard is None,
        )
        is_first = not found
        self.planning = Planning(
            self.machine,
            rules_of(config),
            order=self._handle,
            max_workers=config.pools.max_workers,
            took_over=not is_first,
        )
        self._is_adopting = False
        self._first_failure = self._loop.create_future() if is_first else None
        self._adopt(found)
        if is_first:
            most = limits.max_workers
            if intent.pools.total > most:
                raise ConfigError(
                    f"{intent.pools.total} workers are more than the {most} there can be: "
                    f"{limits.why_no_more}"
                )
            self._report(f"starting {intent.pools.total} workers")
        self._handle(PoolTick())
        self._spawn(self._watch())
        self._spawn(self._watch_room())
        if is_first:
            await self._until_begun()
        self._first_failure = None

    async def close(self) -> None:
        """Ends the sessions. What was started goes on."""
        self._is_closing = True
        tasks = [*self._tasks, *self._dialling.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=HANDSHAKE_TIMEOUT_S)
        for threads in (self._threads, self._start_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _adopt(self, found: Mapping[str, WorkerReady | GatewayReady]) -> None:
        for name, ready in found.items():
            if isinstance(ready, WorkerReady):
                self.workers[WorkerId(name)] = ready
        members = tuple(
            Member(name, ready.address, ready.version, ready.context_len)
            for name, ready in self.workers.items()
        )
        gateways = tuple(name for name in self.gateways if name in self.machine.gateways)
        if members or gateways:
            self._handle(Found(members, gateways))
        for name, link in self.gateway_links.items():
            if not link.is_open:
                self._handle(GatewayUnheard(name, "it does not answer"))
        for name in self.workers:
            self._dial_worker(name)

    async def _adopt_gateways(
        self, found: Mapping[str, WorkerReady | GatewayReady]
    ) -> Members | None:
        """Dials the gateways that run; the newest members that one of them was told."""
        waits: list[asyncio.Task[None]] = []
        for name, ready in found.items():
            if isinstance(ready, GatewayReady):
                self.gateways[name] = ready
                heard = asyncio.Event()
                self._dial_gateway(name, on_welcome=heard.set)
                waits.append(asyncio.create_task(_set(heard)))
        if waits:
            _, late = await asyncio.wait(waits, timeout=HANDSHAKE_TIMEOUT_S)
            for task in late:
                task.cancel()
        heard_of = [link.heard for link in self.gateway_links.values() if link.heard is not None]
        members = [welcome.members for welcome in heard_of if welcome.members is not None]
        return max(members, key=lambda each: each.version, default=None)

    async def _until_begun(self) -> None:
        assert self._first_failure is not None
        while not self.machine.has_begun:
            await asyncio.wait([self._first_failure], timeout=SETTLE_EVERY_S)
            if self._first_failure.done():
                raise ConfigError(self._first_failure.result())

    # ------------------------------------------------------------ what operators ask

    def order(self, order: Order) -> None:
        """Raises OrderRefused, with the reason."""
        if isinstance(order, SetPlanner):
            self.planning.check(order.mode)
        self._handle(order)

    async def requests(self) -> tuple[int, list[tuple[str, RequestInfo]]]:
        """How many are being served, and the oldest of each gateway, with its name."""
        links = dict(self.gateway_links)
        lists = await asyncio.gather(*(link.requests() for link in links.values()))
        answered = [
            (name, each) for name, each in zip(links, lists, strict=True) if each is not None
        ]
        if len(answered) < len(links):
            silent = ", ".join(sorted(set(links) - {name for name, _ in answered}))
            raise OrderRefused(f"no answer in {ANSWER_TIMEOUT_S:g} s from {silent}", status=503)
        found = [(name, info) for name, each in answered for info in each.requests]
        return sum(each.num_requests for _, each in answered), found

    @property
    def counters(self) -> dict[str, int]:
        """What happened to the pools, and to what keeps them; what never did is not there."""
        found = {**self.machine.counters, **self._launcher.counters()}
        found["controller bugs"] = self._num_bugs
        return {name: number for name, number in found.items() if number}

    @property
    def url(self) -> str:
        """Where clients send requests; empty while no gateway has ever run."""
        return next((ready.url for ready in self.gateways.values()), "")

    # ------------------------------------------------------------ events and effects

    def _handle(self, event: PoolEvent) -> None:
        if self._is_closing:
            return
        for effect in self.machine.handle(event, self._clock.now_s()):
            self._perform(effect)

    def _perform(self, effect: PoolEffect) -> None:
        match effect:
            case StartWorker(worker_id):
                self._starts[worker_id] = self._spawn(self._start_worker(effect))
            case StopWorker(worker_id, by_force):
                self._hang_up(worker_id)
                self._spawn(self._stop_worker(worker_id, by_force=by_force))
            case SetWorkerRole(worker_id, role):
                if (link := self.links.get(worker_id)) is not None:
                    link.set_role(role)
            case StartGateway(name):
                self._spawn(self._start_gateway(name))
            case StopGateway(name):
                self._hang_up(name)
                self._spawn(self._stop_gateway(name))
            case Publish(members):
                for gateway in self.gateway_links.values():
                    gateway.tell(members)
            case Tell(step):
                self._report(str(step))

    async def _start_worker(self, wanted: StartWorker) -> None:
        worker_id, start = wanted.worker_id, wanted.start
        try:
            spec = self._worker_spec(wanted)
            ready = await self._loop.run_in_executor(
                self._start_threads, self._launcher.start_worker, spec
            )
        except Exception as error:  # whatever it was, it is tried again
            reason = str(error) or repr(error)
            waits = self._may_have_place_later(error)
            if not waits:
                self._note_failure(reason)
            if not isinstance(error, ConfigError):  # something of it may be left
                await self._end(worker_id, by_force=True)
            self._handle(WorkerStartFailed(worker_id, start, reason, waits))
            return
        worker = self.machine.workers.get(worker_id)
        if worker is None or worker.start != start or worker.state is not WorkerState.STARTING:
            await self._end(worker_id, by_force=True)  # it was stopped while it started
            return
        self.workers[worker_id] = ready
        self._handle(WorkerStarted(worker_id, start, ready.address, ready.context_len))
        self._dial_worker(worker_id)

    async def _stop_worker(self, worker_id: WorkerId, *, by_force: bool) -> None:
        """A start that is under way may have made nothing yet that could be ended. So the name is
        free, for another start, when that one is over too.
        """
        await self._end(worker_id, by_force=by_force)
        while (start := self._starts.get(worker_id)) is not None and not start.done():
            await asyncio.wait([start], timeout=WATCH_EVERY_S)
            await self._end(worker_id, by_force=True)
        self._starts.pop(worker_id, None)
        self._handle(WorkerStopped(worker_id))

    async def _end(self, name: str, *, by_force: bool) -> None:
        """Until nothing of it is left, whatever goes wrong meanwhile."""
        never = self._loop.create_future()
        while True:
            try:
                await self._in_thread(lambda: self._launcher.stop(name, by_force=by_force))
                return
            except Exception as error:
                self._note_bug(error)
            await asyncio.wait([never], timeout=WATCH_EVERY_S)

    async def _start_gateway(self, name: str) -> None:
        try:
            ready = await self._in_thread(self._launcher.start_gateway, self._gateway_spec(name))
        except Exception as error:  # as with workers
            reason = str(error) or repr(error)
            self._note_failure(reason)
            if not isinstance(error, ConfigError):
                await self._end(name, by_force=True)
            self._handle(GatewayFailed(name, reason))
            return
        self.gateways[name] = ready
        self._dial_gateway(name)
        self._handle(GatewayStarted(name))

    async def _stop_gateway(self, name: str) -> None:
        await self._end(name, by_force=True)
        self._handle(GatewayStopped(name))

    def _may_have_place_later(self, error: Exception) -> bool:
        """Whether a start failed for want of a node, where nodes that come are counted on."""
        return isinstance(error, NoPlace) and self._plan.config.pools.max_workers is not None

    def _note_failure(self, reason: str) -> None:
        first = self._first_failure
        if first is not None and not first.done():
            first.set_result(reason)

    async def _watch(self) -> None:
        """Sees who ended, and that time passes; whatever goes wrong, it looks again."""
        never = self._loop.create_future()
        while True:
            await asyncio.wait([never], timeout=WATCH_EVERY_S)
            try:
                for name, how in (await self._in_thread(self._launcher.dead)).items():
                    self._hang_up(name)
                    self._handle(Died(name, how))
                self._handle(PoolTick())
                self._plan_pools()
            except Exception as error:
                self._note_bug(error)

    async def _watch_room(self) -> None:
        """Asks for nodes, and sees them come and go. Where a cluster gives no answer, only this
        waits for it.
        """
        never = self._loop.create_future()
        while True:
            await asyncio.wait([never], timeout=WATCH_EVERY_S)
            try:
                workers = self.machine.workers
                if all(worker.target is not None for worker in workers.values()):
                    # Else who is wanted again is not known: of those found not all said their role.
                    await self._in_thread(self._launcher.keep_places, [str(w) for w in workers])
                await self._ask_for_room()
                room = await self._in_thread(self._look_for_room)
                limits = self.machine.limits
                if room != RoomSeen(limits.max_workers, limits.why_no_more):
                    self._handle(room)
            except Exception as error:
                self._note_bug(error)

    def _look_for_room(self) -> RoomSeen:
        """What the configuration says, or the launcher."""
        pools = self._plan.config.pools
        if pools.max_workers is not None:
            return RoomSeen(pools.max_workers, "see pools.max_workers")
        room = self._launcher.room(pools.num_gpus)
        return RoomSeen(room, f"{self._launcher.scarce(pools.num_gpus)} (see pools.max_workers)")

    def _plan_pools(self) -> None:
        names = self.machine.gateways
        reports = [
            link.fresh_report if (link := self.gateway_links.get(name)) else None for name in names
        ]
        infos = {name: link.info for name, link in self.links.items() if link.info is not None}
        decision = self.planning.tick(reports, infos, self._clock.now_s())
        if decision is not None:
            why = "; ".join(decision.reasons)
            self._report(f"planner ({decision.mode}): {decision}, because {why}")

    async def _ask_for_room(self) -> None:
        """If the planner wants other room than was asked for."""
        if self.planning.room_for is None:
            return
        wanted = self.planning.room_for, self.machine.intent.pools
        if wanted != self._asked_for:
            await self._in_thread(self._launcher.ask_for, *wanted, self._plan.config.pools.num_gpus)
            self._asked_for = wanted

    def block_events(self) -> BlockEventsAnswer:
        """What an operator gives to a subscriber that is no gateway."""
        secret = Secret(self._plan.token)
        mine = client_keys(secret, Channel.BLOCK_EVENTS)
        infos = {name: link.info for name, link in self.links.items()}
        return BlockEventsAnswer(
            curve_serverkey=server_keys(secret, Channel.BLOCK_EVENTS).public.decode(),
            curve_publickey=mine.public.decode(),
            curve_secretkey=mine.secret.decode(),
            workers={n: i.events for n, i in infos.items() if i is not None and i.events},
        )

    # ------------------------------------------------------------ specs

    def _worker_spec(self, wanted: StartWorker) -> WorkerSpec:
        version = wanted.version
        config = config_of(wanted.role, version.worker)
        num_workers = max(sum(v.pools.total for v in self.machine.intent.versions), 1)
        return WorkerSpec(
            worker_id=wanted.worker_id,
            role=wanted.role,
            model=version.model,
            config=config,
            token=self._plan.token,
            threads=config.threads or max(1, self._plan.cores // num_workers),
            memory_bytes=self._plan.memory_bytes,
            num_workers=num_workers,
            log_level=self._plan.log_level,
            version=version.name,
        )

    def _gateway_spec(self, name: str) -> GatewaySpec:
        config = self._plan.config
        others = list(self.gateways.values())
        gateway = config.gateway
        if others:  # they listen where the first one does
            gateway = msgspec.structs.replace(gateway, port=urlsplit(others[0].url).port)
        return GatewaySpec(
            members=self.machine.members,
            gateway=gateway,
            router=config.router,
            token=self._plan.token,
            log_level=self._plan.log_level,
            name=name,
            process=self._plan.gateways.index(name),
            joins=bool(others),
            siblings=self._plan.siblings,
        )

    # ------------------------------------------------------------ sessions

    def _dial_worker(self, worker_id: WorkerId) -> None:
        address = self.workers[worker_id].address
        link = WorkerLink(
            worker_id,
            address,
            controller_id=self.controller_id,
            on_event=self._handle,
        )
        self.links[worker_id] = link
        self._dial(worker_id, address, link)

    def _dial_gateway(self, name: str, on_welcome: Callable[[], None] | None = None) -> None:
        link = GatewayLink(
            clock=self._clock,
            members=lambda: self.machine.members,
            on_report=lambda report: self._on_report(name, report),
            on_welcome=lambda: self._welcome(name, on_welcome),
            on_lost=lambda reason: self._on_gateway_lost(name, reason),
        )
        self.gateway_links[name] = link
        self._dial(name, self.gateways[name].control, link)

    def _welcome(self, name: str, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        if self._is_adopting:
            return
        link, members = self.gateway_links[name], self.machine.members
        known = None if link.heard is None else link.heard.members
        counts = known is not None and (known.version >= members.version or self.machine.is_guess)
        if known is not None and counts and known != members:
            self._handle(Overtaken(known))  # which tells all
        else:
            link.welcome()
        self._handle(GatewayHeard(name))  # last: from now on nothing more of it is waited for

    def _on_gateway_lost(self, name: str, reason: str) -> None:
        if not self._is_adopting and name in self.gateway_links:  # else it was given up
            self._handle(GatewayUnheard(name, reason))

    def _on_report(self, name: str, report: GatewayReport | None) -> None:
        if not self._is_adopting:
            self._handle(GatewaySeen(name, report))

    def _dial(self, name: str, address: str, link: WorkerLink | GatewayLink) -> None:
        self._hang_up_task(name)
        self._dialling[name] = task = asyncio.create_task(self._keep(address, link))
        task.add_done_callback(self._on_task_end)

    async def _keep(self, address: str, link: WorkerLink | GatewayLink) -> None:
        """A bug of the controller's ends no session for ever: who cannot be reached is stopped."""
        never = self._loop.create_future()
        while True:
            try:
                await keep(address, Secret(self._plan.token), link)
            except Exception as error:
                self._note_bug(error)
            await asyncio.wait([never], timeout=RETRY_EVERY_S)

    def _hang_up(self, name: str) -> None:
        """Forgets a worker or a gateway that is gone."""
        self._hang_up_task(name)
        self.links.pop(WorkerId(name), None)
        self.gateway_links.pop(name, None)

    def _hang_up_task(self, name: str) -> None:
        if (task := self._dialling.pop(name, None)) is not None:
            task.cancel()

    # ------------------------------------------------------------ tasks

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Launchers block. None of their calls waits for another, nor for a worker's start, which
        has threads of its own.
        """
        return await self._loop.run_in_executor(self._threads, function, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        """A task that died of a bug is told, and the others go on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_bug(error)

    def _note_bug(self, error: BaseException) -> None:
        self._num_bugs += 1
        log.critical("a task of the controller failed: %r", error, exc_info=error)
        self._report(f"the controller has a bug: {error!r}")


async def _set(event: asyncio.Event) -> None:
    await event.wait()
