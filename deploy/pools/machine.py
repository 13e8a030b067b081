"""Decides which services to start, flip, drain and stop to give the pools their wanted size.

Pure: `handle(event, now_s)` returns effects. The machine knows the intent, the observed facts, and
its own orders. It does not know how processes are started or how sessions work. The parts of the
machine:

- `state`: the operator's intent, the limits, the steps and counters, and the restarts
- `workers.registry`: the record of each worker; `workers.sightings`: facts and deadlines;
  `workers.reconcile` and `workers.moves`: the next moves; `workers.orders`: operators' orders
- `versions`: orders about versions, and rollouts
- `gateways`: starts and ends of gateways, and their reports
- `stores`: starts and ends of stores of KV

The life of a worker:

    waiting ──> starting ──> joining ──> serving <──> flipping
       ^            │           │           │
       │    start failed, died, or no session for too long
       └────────────┴───────────┴───────────┤
                                        draining ──> drained (stays if the operator wants it)
                                            └──────> stopping ──> gone

Every wait has a deadline. A flip that the worker does not answer is abandoned. A draining worker
that does not become idle in time is stopped anyway. A worker that has no session for too long is
killed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from deploy.pools.events import (
    Connected,
    Died,
    Disconnected,
    Found,
    GatewayHeard,
    GatewaySeen,
    GatewaySilent,
    LoadSeen,
    NodesSeen,
    OrdersStored,
    Overtaken,
    PartsSeen,
    PoolEffect,
    PoolEvent,
    PoolTick,
    Publish,
    RoleSeen,
    RoomSeen,
    ServiceFailed,
    ServiceStarted,
    ServiceStopped,
    StoresSeen,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from deploy.pools.gateways import Gateways, GatewayState
from deploy.pools.kernels import kernel_troubles
from deploy.pools.orders import (
    Abort,
    AddVersion,
    Adjust,
    Drain,
    Finish,
    Flip,
    Order,
    Rollback,
    SetPlanner,
    SetPools,
    SetWeights,
    Stop,
)
from deploy.pools.state import PoolLimits, PoolState
from deploy.pools.stores import PoolStore, Stores
from deploy.pools.versions.canary import CanaryStanding
from deploy.pools.versions.rollout import Scene
from deploy.pools.versions.sleeping import ModelSleep
from deploy.pools.versions.updates import VersionUpdates
from deploy.pools.workers.moves import WorkerMoves
from deploy.pools.workers.orders import WorkerOrders
from deploy.pools.workers.record import PoolWorker, WorkerState
from deploy.pools.workers.registry import PoolWorkers
from deploy.pools.workers.sightings import WorkerSightings
from deploy.pools.workers.stand_ins import stand_in_troubles
from engine.control import MAIN_LINE, Intent, Members, Version, VersionReport, by_number
from engine.messages import Role, WorkerId

MAX_TROUBLES = 8  # maximum number of sentences about troubles


class PoolMachine:
    """Passes events to its parts, and publishes the members that result."""

    def __init__(
        self,
        intent: Intent,
        *,
        limits: PoolLimits,
        gateways: Sequence[str] = (),
        version: int = 0,
        is_guess: bool = False,
    ) -> None:
        """`version` is the version of the latest members that an earlier controller published.

        `is_guess`: an earlier controller ran, and no gateway has reported its intent yet.
        """
        self.members = Members(version, (), intent)
        self.state = state = PoolState(intent, limits, is_guess=is_guess)
        self.restarts = state.restarts
        self.history = state.steps  # the latest steps, oldest first
        self.counters = state.counters  # number of occurrences of each kind of trouble
        self._workers = workers = PoolWorkers(state)
        self._gateways = Gateways(gateways, state)
        self._stores = Stores(state)
        self.stores: Mapping[str, PoolStore] = self._stores.by_name
        self.workers: Mapping[WorkerId, PoolWorker] = workers.by_id
        self.gateways: Mapping[str, GatewayState] = self._gateways.states
        # Dead programs that services depend on, such as Ray's GCS.
        self.dead_parts: tuple[str, ...] = ()
        self._unstored: str | None = None  # why the latest orders are not stored
        self._sightings = WorkerSightings(workers, state)
        self._moves = WorkerMoves(workers, state)
        self._updates = VersionUpdates(workers)
        self._sleep = ModelSleep(workers)
        orders = WorkerOrders(workers, state)
        # The handler of each event yields effects. A handler of an order raises OrderRefused before
        # any change.
        self._handlers: Mapping[type, Callable[[Any, float], Iterator[PoolEffect]]] = {
            Found: self._on_found,
            Died: self._on_died,
            GatewayHeard: self._on_gateway_heard,
            Overtaken: self._on_overtaken,
            RoomSeen: self._on_room,
            PartsSeen: self._on_parts,
            OrdersStored: self._on_orders_stored,
            PoolTick: self._on_tick,
            WorkerStarted: self._sightings.on_started,
            WorkerStartFailed: self._sightings.on_start_failed,
            WorkerStopped: self._sightings.on_stopped,
            Connected: self._sightings.on_connected,
            Disconnected: self._sightings.on_disconnected,
            RoleSeen: self._sightings.on_role,
            LoadSeen: self._sightings.on_load,
            NodesSeen: self._on_nodes,
            StoresSeen: self._stores.on_seen,
            ServiceStarted: lambda event, now_s: self._part(event.name).on_started(event, now_s),
            ServiceFailed: lambda event, now_s: self._part(event.name).on_failed(event, now_s),
            ServiceStopped: lambda event, now_s: self._part(event.name).on_stopped(event, now_s),
            GatewaySilent: self._gateways.on_silent,
            GatewaySeen: self._gateways.on_seen,
            SetPools: orders.set_pools,
            Flip: orders.flip,
            Drain: orders.drain,
            Stop: orders.stop,
            SetPlanner: orders.set_planner,
            Adjust: orders.adjust,
            AddVersion: self._updates.add,
            SetWeights: self._updates.set_weights,
            Finish: self._updates.finish,
            Abort: self._updates.abort,
            Rollback: self._updates.rollback,
        }

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolEffect]:
        """Handles an event and returns its effects. If an order is refused, raises OrderRefused and
        changes nothing.

        A load report that ends no drain and no moves is only recorded. Every worker sends one each
        second, and each second there is a tick too. Work that becomes due by time is done at the
        tick.
        """
        effects: list[PoolEffect] = list(self._handlers[type(event)](event, now_s))
        if isinstance(event, LoadSeen) and not effects:
            return effects
        if isinstance(event, Order):
            self.state.is_guess = False
        self.state.follow()
        effects += self._updates.roll(self.members.intent, self._scene(), now_s)
        effects += self._sleep.check(self.members.intent, self._scene(), now_s)
        effects += self._moves.reconcile(now_s)
        effects += self._stores.reconcile(self.intent.versions, now_s)
        if self._gateways.have_served or self._workers.serve_enough():
            effects += self._gateways.start(now_s)
        effects += self._publish()
        return effects

    # ------------------------------------------------------------ questions

    @property
    def intent(self) -> Intent:
        """The operator's intent."""
        return self.state.intent

    @property
    def is_guess(self) -> bool:
        """True if a gateway may still report another intent."""
        return self.state.is_guess

    @property
    def limits(self) -> PoolLimits:
        """The limits and deadlines of the pools."""
        return self.state.limits

    @property
    def is_settled(self) -> bool:
        """True if all services are in their wanted state, and no change is under way."""
        steady = (WorkerState.SERVING, WorkerState.DRAINED)
        return (
            self.intent.rollout is None
            and not self.dead_parts
            and not any(version.is_leaving for version in self.intent.versions)
            and self._scene().is_quiet(self.intent.versions)
            and all(w.state in steady for w in self.workers.values())
            and all(w.moves_since_s is None for w in self.workers.values())
            and self._gateways.all_serve
        )

    @property
    def has_begun(self) -> bool:
        """True if clients are served.

        All wanted workers must serve, unless some of them wait for nodes.
        """
        return self.is_settled or (self._workers.waits_for_nodes and self._gateways.all_serve)

    def serving(self, name: str) -> Counter[Role | None]:
        """Counts the serving workers of a version by role."""
        return self._scene().serving(name)

    def reports_of(self, name: str) -> list[VersionReport]:
        """Returns the gateways' latest reports about a version."""
        return self._gateways.reports_of(name)

    @property
    def canary(self) -> CanaryStanding | None:
        """The results of the version that takes over.

        None if there is no version that could be aborted.
        """
        return self._updates.canary

    def validate(self) -> None:
        """Asserts the invariants of all parts."""
        names = [version.name for version in self.intent.versions]
        assert len(set(names)) == len(names)
        for version in self.intent.versions:
            assert version.has_workers == (version.asleep is None and not version.is_over)
            assert not version.has_workers or version.pools.check()
            assert version.weight == 0 or not version.is_leaving
        assert self.intent.rollout is None or self.intent.rollout.to in names
        lines = [version.line for version in self.intent.versions]
        assert lines == sorted(lines, key=lines.index), "versions of a line must be neighbours"
        for line in {MAIN_LINE, *lines}:
            assert any(not version.is_leaving for version in self.intent.of_line(line))
        self._workers.validate()
        assert self.members.stores == self._stores.members()
        told = {member.worker_id for member in self.members.workers}
        assert told == {w.worker_id for w in self.workers.values() if w.runs}

    def _scene(self) -> Scene:
        reports = self._gateways.reports_on(self.members.version)
        return Scene(self.workers, reports, self._workers.room())

    # ------------------------------------------------------------ events about several parts

    def _on_found(self, event: Found, now_s: float) -> Iterator[PoolEffect]:
        self._workers.took_over = bool(event.workers)
        for member in event.workers:
            yield from self._sightings.on_found(member, now_s)
        for name in event.gateways:
            self._gateways.serve(name, now_s)
            yield self.state.record(now_s, name, "was found running")
        for store in event.stores:
            version = self.intent.version(store.version) or Version(store.version)
            self._stores.found(store.name, version, store.node, store.address, now_s)
            yield self.state.record(now_s, store.name, "was found running")

    def _part(self, name: str) -> Gateways | Stores:
        """Returns the part that owns a gateway or a store.

        The store may have been removed meanwhile.
        """
        return self._gateways if name in self.gateways else self._stores

    def _on_died(self, event: Died, now_s: float) -> Iterator[PoolEffect]:
        is_worker = event.name not in self.gateways and event.name not in self.stores
        part = self._sightings if is_worker else self._part(event.name)
        yield from part.on_died(event, now_s)

    def _on_nodes(self, event: NodesSeen, _: float) -> Iterator[PoolEffect]:
        """Updates the list of nodes and their stores."""
        self._stores.nodes = event.nodes
        yield from ()

    def _on_gateway_heard(self, event: GatewayHeard, _: float) -> Iterator[PoolEffect]:
        self._gateways.heard(event.name)
        self.state.is_guess = self.state.is_unconfirmed = False
        yield from ()

    def _on_overtaken(self, event: Overtaken, now_s: float) -> Iterator[PoolEffect]:
        """Takes over an earlier controller's intent if the present intent is a guess.

        Publishes the present members under a higher number, because gateways ignore lower numbers.
        """
        theirs, ours = event.members, self.members
        takes = self.is_guess and theirs.intent != self.intent
        if takes:
            self.state.intent = theirs.intent
            names = ", ".join(version.name for version in self.intent.versions)
            what = f"continue with {names}"
            yield self.state.record(now_s, "pools", what, "a gateway reported it")
        if takes or theirs.version >= ours.version:
            number = max(theirs.version, ours.version) + 1
            self.members = Members(number, ours.workers, self.intent, ours.stores)
            yield Publish(self.members)

    def _on_room(self, event: RoomSeen, now_s: float) -> Iterator[PoolEffect]:
        """Updates the limit of workers. A lower limit stops no running worker."""
        most, before = event.max_workers, self.limits.max_workers
        self.state.limit(most, event.why)
        if most != before:
            what = f"can have {most} workers"
            yield self.state.record(now_s, "pools", what, f"before, {before}")

    def troubles(self) -> tuple[str, ...]:
        """Returns sentences about present faults and limits.

        Requests are served in spite of them.
        """
        dead = (
            f"{part} of Ray is dead: no service can be started or stopped"
            for part in self.dead_parts
        )
        stored = [] if self._unstored is None else [self._unstored]
        services = (
            *self._gateways.troubles(),
            *self._workers.troubles(),
            *self._stores.troubles(),
        )
        workers = self.workers.values()
        pools = (*stand_in_troubles(workers, self.intent.versions), *kernel_troubles(workers))
        found = [*dead, *stored, *pools, *self._sleep.troubles(), *services]
        more = [f"and {len(found) - MAX_TROUBLES} more"] if len(found) > MAX_TROUBLES else []
        return (*found[:MAX_TROUBLES], *more)

    def _on_parts(self, event: PartsSeen, now_s: float) -> Iterator[PoolEffect]:
        """Records which programs that services depend on have died or run again.

        Serving requests does not need these programs.
        """
        dead = tuple(name for name, is_alive in event.alive.items() if not is_alive)
        for name in dead:
            if name not in self.dead_parts:
                self.state.counters["deaths of Ray's parts"] += 1
                why = "no service can be started or stopped until it runs again"
                yield self.state.record(now_s, name, "is dead", why)
        for name in self.dead_parts:
            if name not in dead:
                yield self.state.record(now_s, name, "runs again")
        self.dead_parts = dead

    def _on_orders_stored(self, event: OrdersStored, now_s: float) -> Iterator[PoolEffect]:
        """Records a step when orders cannot be stored any more, and when orders can be stored
        again.
        """
        before, self._unstored = self._unstored, event.trouble
        if before is None and event.trouble is not None:
            yield self.state.record(now_s, "pools", event.trouble)
        elif before is not None and event.trouble is None:
            yield self.state.record(now_s, "pools", "store orders again")

    def _on_tick(self, _: PoolTick, now_s: float) -> Iterator[PoolEffect]:
        yield from self._sightings.sweep(now_s)
        yield from self._gateways.sweep(now_s)
        yield from self._updates.sweep(now_s)

    def _publish(self) -> Iterator[PoolEffect]:
        kept = tuple(sorted(self._workers.kept(), key=by_number))
        self.state.intent = msgspec.structs.replace(self.intent, drained=kept)
        members = Members(
            self.members.version, self._workers.members(), self.intent, self._stores.members()
        )
        if members != self.members:
            self.members = msgspec.structs.replace(members, version=members.version + 1)
            yield Publish(self.members)
