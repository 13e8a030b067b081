"""What is started, flipped, drained and stopped so that the pools are what the operator wants.

Sans I/O: `handle(event, now_s)` returns effects. It knows what is wanted, what was seen of each
worker, and what it asked for; not how processes are started, nor what a session is. What to do next
is `deploy.pools.reconcile`'s decision, and how versions follow one another that of
`deploy.pools.rollout`;
gateways are in `deploy.pools.gateways`. Here is what follows from all that for workers, and comes
of it:

    waiting ──> starting ──> joining ──> serving <──> flipping
       ^            │           │           │
       │   it did not start, died, or could not be reached
       └────────────┴───────────┴───────────┤
                                        draining ──> drained (where the operator wants it so)
                                            └──────> stopping ──> gone

Whatever cannot be answered in time is ended: a flip without an answer is given up, a worker that
does not become idle is stopped all the same, one that cannot be reached is stopped by force.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from deploy.model_source import is_remote
from deploy.pools import rollout
from deploy.pools.events import (
    Abort,
    AddVersion,
    Connected,
    Died,
    Disconnected,
    Drain,
    Finish,
    Flip,
    Found,
    GatewayFailed,
    GatewayHeard,
    GatewaySeen,
    GatewayStarted,
    GatewayState,
    GatewayStopped,
    GatewayUnheard,
    LoadSeen,
    Order,
    OrderRefused,
    Overtaken,
    PoolEffect,
    PoolEvent,
    Publish,
    RoleSeen,
    RoomSeen,
    SetPlanner,
    SetPools,
    SetWeights,
    SetWorkerRole,
    Started,
    StartFailed,
    StartWorker,
    Step,
    Stop,
    Stopped,
    StopWorker,
    Tell,
    Tick,
    Worker,
    WorkerState,
)
from deploy.pools.formats import formats_of
from deploy.pools.gateways import Gateways
from deploy.pools.reconcile import (
    Abandon,
    Begin,
    Drop,
    FlipTo,
    Move,
    Retire,
    last_that,
    next_move,
)
from deploy.pools.restarts import STEADY_S, Restarts
from engine.control import (
    SERVING_ROLES,
    Intent,
    Member,
    Members,
    Pools,
    Version,
    VersionReport,
)
from engine.messages import Role, WorkerId

FLIP_TIMEOUT_S = 10.0  # a worker answers between two steps
UNREACHABLE_S = 30.0  # a worker without a session for so long is stopped by force
MAX_HISTORY = 1000  # steps

_RUNNING = (
    WorkerState.JOINING,
    WorkerState.SERVING,
    WorkerState.FLIPPING,
    WorkerState.DRAINING,
    WorkerState.DRAINED,
)
_COMING = (WorkerState.WAITING, WorkerState.STARTING, WorkerState.JOINING)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What the machine is built with."""

    max_workers: int
    why_no_more: str = ""  # than `max_workers`
    drain_timeout_s: float = 60.0
    update_timeout_s: float = 900.0  # an update that makes no step for so long is given up
    steady_s: float = STEADY_S  # who lived that long ended for a new reason


class PoolMachine:
    """The one owner of what is known of the pools."""

    def __init__(
        self,
        intent: Intent,
        *,
        limits: PoolLimits,
        gateways: Sequence[str] = (),
        version: int = 0,
        is_guess: bool = False,
    ) -> None:
        """`version` is the last one that a gateway heard, from an earlier controller. With
        `is_guess` there was one, and nobody could be asked what it wanted: what a gateway says of
        it later counts, as long as there was no order.
        """
        self.intent = intent
        self.limits = limits
        self.workers: dict[WorkerId, Worker] = {}
        self.members = Members(version, (), intent)
        self.history: deque[Step] = deque(maxlen=MAX_HISTORY)
        self.counters: Counter[str] = Counter()
        self.restarts = Restarts(limits.steady_s)
        self._gateways = Gateways(
            gateways, restarts=self.restarts, counters=self.counters, tell=self._tell
        )
        self._stalled_s = 0.0  # for how long the update has made no step; fetches do not count
        self._ticked_s: float | None = None
        self._num_steps = 0
        self._num_starts = 0
        self.is_guess = is_guess  # the intent
        self._is_unheard = is_guess  # no gateway has said what an earlier controller wanted
        self._took_over = False  # from a controller that was there before: what serves is enough
        self._waits_for_nodes = False  # and so it is where workers need nodes that come later
        self._handlers: Mapping[type, Any] = {
            Found: self._on_found,
            Started: self._on_started,
            StartFailed: self._on_start_failed,
            Stopped: self._on_stopped,
            Died: self._on_died,
            Connected: self._on_connected,
            Disconnected: self._on_disconnected,
            RoleSeen: self._on_role,
            LoadSeen: self._on_load,
            GatewayStarted: self._gateways.on_started,
            GatewayFailed: self._gateways.on_failed,
            GatewayHeard: self._on_gateway_heard,
            GatewayUnheard: self._gateways.on_unheard,
            GatewayStopped: self._gateways.on_stopped,
            Overtaken: self._on_overtaken,
            RoomSeen: self._on_room,
            GatewaySeen: self._gateways.on_seen,
            Tick: self._on_tick,
            SetPools: self._on_set_pools,
            Flip: self._on_flip,
            Drain: self._on_drain,
            Stop: self._on_stop,
            SetPlanner: self._on_set_planner,
            AddVersion: self._on_add_version,
            SetWeights: self._on_set_weights,
            Finish: self._on_finish,
            Abort: self._on_abort,
        }

    def handle(self, event: PoolEvent, now_s: float) -> list[PoolEffect]:
        """What follows from an event. Raises OrderRefused, and then nothing has changed."""
        effects: list[PoolEffect] = list(self._handlers[type(event)](event, now_s))
        if isinstance(event, Order):
            self.is_guess = False
        effects += self._roll(now_s)
        effects += self._reconcile(now_s)
        effects += self._publish()
        return effects

    @property
    def gateways(self) -> Mapping[str, GatewayState]:
        """How far each has come."""
        return self._gateways.states

    @property
    def is_settled(self) -> bool:
        """Whether all is as it is wanted, and nothing is under way."""
        steady = (WorkerState.SERVING, WorkerState.DRAINED)
        return (
            self.intent.rollout is None
            and not any(version.is_leaving for version in self.intent.versions)
            and self._scene().is_quiet(self.intent.versions)
            and all(w.state in steady for w in self.workers.values())
            and all(w.moves_since_s is None for w in self.workers.values())
            and self._gateways.all_serve
        )

    @property
    def has_begun(self) -> bool:
        """Whether clients are served: at first by all that is wanted, unless nodes are to come."""
        return self.is_settled or (self._waits_for_nodes and self._gateways.all_serve)

    def serving(self, name: str) -> Counter[Role | None]:
        """Workers of a version that serve, by role."""
        return self._scene().serving(name)

    def reports_of(self, name: str) -> list[VersionReport]:
        """What gateways say of a version."""
        return self._gateways.reports_of(name)

    def validate(self) -> None:
        """Asserts the invariants."""
        names = [version.name for version in self.intent.versions]
        assert len(set(names)) == len(names)
        for version in self.intent.versions:
            assert version.is_over or version.pools.check()
            assert version.is_leaving or not version.is_over
            assert version.weight == 0 or not version.is_leaving
        assert self.intent.rollout is None or self.intent.rollout.to in names
        assert any(not version.is_leaving for version in self.intent.versions)
        for worker in self.workers.values():
            runs = worker.state in _RUNNING
            assert worker.address is not None or not runs
            assert runs or not worker.is_connected
            assert worker.is_connected or worker.lost_s is not None or not runs
            unasked = (WorkerState.JOINING, WorkerState.STOPPING)
            assert worker.target is not None or worker.state in unasked
            going = (WorkerState.DRAINING, WorkerState.DRAINED)
            assert (worker.target is Role.DRAINED) >= (worker.state in going)
            assert worker.leaves <= (worker.target is Role.DRAINED)
            assert worker.moves_since_s is None or worker.role is Role.PREFILL
        named = {member.worker_id for member in self.members.workers}
        assert named == {w.worker_id for w in self.workers.values() if w.state in _RUNNING}

    # ------------------------------------------------------------ what was seen of workers

    def _on_found(self, event: Found, now_s: float) -> Iterator[PoolEffect]:
        self._took_over = bool(event.workers)
        for member in event.workers:
            worker = Worker(member.worker_id, None, now_s, WorkerState.JOINING, member.version)
            worker.address, worker.lost_s = member.address, now_s
            worker.context_len, worker.has_run = member.context_len, True
            self.workers[worker.worker_id] = worker
            yield self._tell(now_s, worker.worker_id, "was found running")
        for name in event.gateways:
            self._gateways.serve(name, now_s)
            yield self._tell(now_s, name, "was found running")

    def _on_started(self, event: Started, now_s: float) -> Iterator[PoolEffect]:
        worker = self._starting(event.worker_id, event.start)
        if worker is None:
            return
        self._enter(worker, WorkerState.JOINING, now_s)
        worker.address, worker.lost_s = event.address, now_s
        worker.context_len, worker.has_run = event.context_len, True
        failed = self.restarts.num_failed(worker.worker_id)
        self.restarts.started(worker.worker_id, now_s)
        yield self._tell(now_s, worker.worker_id, "was started again" if failed else "was started")

    def _on_start_failed(self, event: StartFailed, now_s: float) -> Iterator[PoolEffect]:
        worker = self._starting(event.worker_id, event.start)
        if worker is not None:
            self._waits_for_nodes |= event.waits_for_node
            yield from self._lose(worker, f"did not start: {event.reason}", now_s)

    def _on_stopped(self, event: Stopped, now_s: float) -> Iterator[PoolEffect]:
        worker = self.workers.get(event.worker_id)
        if worker is None or worker.state is not WorkerState.STOPPING:
            return
        if worker.target is Role.DRAINED or worker.target is None:
            self._forget(worker)
            yield self._tell(now_s, worker.worker_id, "was stopped")
        else:
            yield from self._lose(worker, "was stopped", now_s)

    def _on_died(self, event: Died, now_s: float) -> Iterator[PoolEffect]:
        if event.name in self.gateways:
            yield from self._gateways.on_died(event, now_s)
            return
        worker = self.workers.get(WorkerId(event.name))
        if worker is None or worker.state not in _RUNNING:
            return
        self.counters["workers died"] += 1
        if worker.target is Role.DRAINED or worker.target is None:
            self._forget(worker)
            yield self._tell(now_s, event.name, event.how, "it was not needed")
        else:
            yield from self._lose(worker, event.how, now_s)

    def _on_connected(self, event: Connected, now_s: float) -> Iterator[PoolEffect]:
        worker = self._at(event.worker_id, event.address)
        if worker is None:
            return
        worker.is_connected, worker.lost_s = True, None
        worker.kv_format = event.kv_format
        self._note_role(worker, event.role, now_s)
        if worker.target is None:
            worker.target = event.role
            worker.leaves = (
                event.role is Role.DRAINED and worker.worker_id not in self.intent.drained
            )
        if worker.state is WorkerState.JOINING:
            goes = worker.target is Role.DRAINED
            self._enter(worker, WorkerState.DRAINING if goes else WorkerState.SERVING, now_s)
        if worker.state is WorkerState.FLIPPING and worker.role is worker.target:
            self._enter(worker, WorkerState.SERVING, now_s)
        if worker.role is worker.target:
            return
        assert worker.target is not None
        if worker.state is WorkerState.SERVING:
            yield from self._flip(worker, worker.target, f"it came back as {worker.role}", now_s)
            return
        if worker.state is WorkerState.FLIPPING:  # it had not heard, and has as long as ever
            self._enter(worker, WorkerState.FLIPPING, now_s)
        yield SetWorkerRole(worker.worker_id, worker.target)

    def _on_disconnected(self, event: Disconnected, now_s: float) -> Iterator[PoolEffect]:
        worker = self._at(event.worker_id, event.address)
        if worker is None or not worker.is_connected:
            return
        worker.is_connected, worker.lost_s, worker.load = False, now_s, None
        yield self._tell(now_s, worker.worker_id, "cannot be reached", event.reason)

    def _on_role(self, event: RoleSeen, now_s: float) -> Iterator[PoolEffect]:
        worker = self._at(event.worker_id, event.address)
        if worker is None:
            return
        before = worker.role
        self._note_role(worker, event.role, now_s)
        worker.load = None  # what it held before says nothing of now
        if event.role is worker.target:
            if worker.state is WorkerState.FLIPPING:
                took_s = now_s - worker.since_s
                self._enter(worker, WorkerState.SERVING, now_s)
                yield self._tell(now_s, worker.worker_id, f"is {event.role} now, {took_s:.1f} s")
        elif worker.state is WorkerState.SERVING:  # somebody else told it
            worker.target = event.role
            if event.role is Role.DRAINED:
                self._enter(worker, WorkerState.DRAINING, now_s)
            yield self._tell(now_s, worker.worker_id, f"became {event.role}", "not by an order")
        elif event.role is before:
            yield from self._give_up_flip(worker, "the worker refuses it", now_s)

    def _note_role(self, worker: Worker, role: Role, now_s: float) -> None:
        """What may decode there leaves where the new role is not for that. A drain ends later."""
        before, worker.role = worker.role, role
        if before is role or before is None:
            return
        may_decode = before.decodes or worker.load is None or worker.load.decode_seqs > 0
        stays = role.decodes or role is Role.DRAINED
        worker.moves_since_s = now_s if may_decode and not stays else None

    def _on_load(self, event: LoadSeen, now_s: float) -> Iterator[PoolEffect]:
        worker = self._at(event.worker_id, event.address)
        if worker is None:
            return
        worker.load = event.load
        if worker.moves_since_s is not None and not worker.num_leaving_seqs:
            took_s = now_s - worker.moves_since_s
            worker.moves_since_s = None
            yield self._tell(
                now_s, worker.worker_id, f"decodes nothing any more, after {took_s:.1f} s"
            )
        if worker.state is WorkerState.DRAINING and worker.role is Role.DRAINED and worker.is_idle:
            yield self._tell(
                now_s, worker.worker_id, f"is drained, after {now_s - worker.since_s:.1f} s"
            )
            self._enter(worker, WorkerState.DRAINED, now_s)
        if worker.state is WorkerState.DRAINED and worker.leaves:
            yield self._end(worker, now_s)

    # ------------------------------------------------------------ gateways that were there before

    def _on_gateway_heard(self, event: GatewayHeard, _: float) -> Iterator[PoolEffect]:
        self._gateways.heard(event.name)
        self.is_guess = self._is_unheard = False
        yield from ()

    def _on_overtaken(self, event: Overtaken, now_s: float) -> Iterator[PoolEffect]:
        """What is known here counts all the same, unless it is a guess: gateways take no version
        but a higher one.
        """
        theirs, ours = event.members, self.members
        takes = self.is_guess and theirs.intent != self.intent
        if takes:
            self.intent = theirs.intent
            names = ", ".join(version.name for version in self.intent.versions)
            yield self._tell(now_s, "pools", f"go on with {names}", "a gateway was told so before")
        if takes or theirs.version >= ours.version:
            number = max(theirs.version, ours.version) + 1
            self.members = Members(number, ours.workers, self.intent)
            yield Publish(self.members)

    def _all_serve(self) -> bool:
        """Whether gateways have whom to send requests to: at first, all that is wanted."""
        workers = self.workers.values()
        if self._took_over or self._waits_for_nodes:
            return any(w.prefills() for w in workers) and any(w.decodes() for w in workers)
        current = self.intent.current
        serving = Counter(w.target for w in workers if w.is_connected and w.version == current.name)
        return all(serving[role] >= current.pools.of(role) for role in SERVING_ROLES)

    # ------------------------------------------------------------ room and time

    def _on_room(self, event: RoomSeen, now_s: float) -> Iterator[PoolEffect]:
        """Nodes come and go. Those that run are not stopped because of it."""
        most, before = event.max_workers, self.limits.max_workers
        self.limits = replace(self.limits, max_workers=most, why_no_more=event.why)
        if most != before:
            yield self._tell(now_s, "pools", f"can have {most} workers", f"not {before} any more")

    def _on_tick(self, _: Tick, now_s: float) -> Iterator[PoolEffect]:
        for worker in list(self.workers.values()):
            yield from self._sweep(worker, now_s)
        yield from self._gateways.sweep(now_s)
        passed_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        yield from self._give_up_rollout(passed_s, now_s)
        yield from self._give_up_newcomers(now_s)

    def _sweep(self, worker: Worker, now_s: float) -> Iterator[PoolEffect]:
        """What has a deadline."""
        waited_s = now_s - worker.since_s
        if worker.state in _RUNNING and worker.lost_s is not None:
            if now_s - worker.lost_s >= UNREACHABLE_S:
                self.counters["workers unreachable"] += 1
                yield self._tell(
                    now_s, worker.worker_id, "is stopped", f"no session for {UNREACHABLE_S:g} s"
                )
                yield self._end(worker, now_s, by_force=True)
        elif worker.state is WorkerState.FLIPPING and waited_s >= FLIP_TIMEOUT_S:
            yield from self._give_up_flip(worker, f"no answer in {FLIP_TIMEOUT_S:g} s", now_s)
        elif self._drains_too_long(worker, waited_s):
            self.counters["drains timed out"] += 1
            why = f"not drained in {waited_s:.0f} s, {worker.num_seqs} sequences are retried"
            yield self._tell(now_s, worker.worker_id, "is stopped all the same", why)
            yield self._end(worker, now_s)

    def _drains_too_long(self, worker: Worker, waited_s: float) -> bool:
        """One that is to stay may take its time."""
        drains = worker.state is WorkerState.DRAINING and worker.leaves
        return drains and waited_s >= self.limits.drain_timeout_s

    # ------------------------------------------------------------ orders

    def _on_set_pools(self, event: SetPools, now_s: float) -> Iterator[PoolEffect]:
        name = event.version or self.intent.current.name
        intent = rollout.resized(self.intent, name, event.pools)
        self._check_room(rollout.known(self.intent, name), event.pools)
        self.intent = intent
        what = f"are to be {_counts(event.pools)}"
        subject = "pools" if len(self.intent.versions) == 1 else f"pools of {name}"
        yield self._tell(now_s, subject, what, event.why)

    def _on_flip(self, event: Flip, now_s: float) -> Iterator[PoolEffect]:
        worker = self._known(event.worker_id)
        self._check_flip(worker, event.role)
        self.intent = rollout.moved(self.intent, worker, event.role)
        worker.refuses.discard(event.role)
        yield from self._flip(worker, event.role, "ordered", now_s)

    def _on_drain(self, event: Drain, now_s: float) -> Iterator[PoolEffect]:
        worker = self._known(event.worker_id)
        self._check_takes_orders(worker, Role.DRAINED)
        self._check_not_last(worker, Role.DRAINED)
        yield from self._take_out(worker, now_s)

    def _on_stop(self, event: Stop, now_s: float) -> Iterator[PoolEffect]:
        worker = self._known(event.worker_id)
        if worker.state is WorkerState.STOPPING or worker.leaves:
            raise OrderRefused(f"{worker.worker_id} is being stopped already")
        if worker.target is None:
            raise OrderRefused(f"{worker.worker_id} was just found; its role is not known yet")
        self._check_not_last(worker, Role.DRAINED)
        if worker.target is not Role.DRAINED:
            yield from self._take_out(worker, now_s)
        worker.leaves = True
        if worker.state in (WorkerState.WAITING, WorkerState.STARTING):
            yield from self._end_unborn(worker, now_s)
        elif worker.state is WorkerState.DRAINED or not worker.is_connected:
            yield self._end(worker, now_s, by_force=not worker.is_connected)

    def _on_set_planner(self, event: SetPlanner, now_s: float) -> Iterator[PoolEffect]:
        self.intent = msgspec.structs.replace(self.intent, planner=event.mode)
        yield self._tell(now_s, "planner", f"is {event.mode}", "ordered")

    def _take_out(self, worker: Worker, now_s: float) -> Iterator[PoolEffect]:
        """An order: its pool has one worker less from now on."""
        self.intent = rollout.moved(self.intent, worker, Role.DRAINED)
        if worker.state in (WorkerState.WAITING, WorkerState.STARTING):
            worker.target = Role.DRAINED
        else:
            yield from self._drain(worker, "ordered", now_s)

    def _check_room(self, version: Version, pools: Pools) -> None:
        kept = [w.worker_id for w in self.workers.values() if self._is_kept(w)]
        most = self.limits.max_workers
        of_others = sum(each.pools.total for each in self.intent.versions if each is not version)
        # What is there may be more than there is room for, since a node was lost: it may change.
        grows = pools.total > version.pools.total
        if grows and pools.total + of_others + len(kept) > most:
            beside = f" beside {', '.join(kept)}, drained," if kept else ""
            beside += f" beside {of_others} of other versions" if of_others else ""
            why = f": {self.limits.why_no_more}" if self.limits.why_no_more else ""
            raise OrderRefused(
                f"{pools.total} workers{beside} are more than the {most} there can be{why}"
            )

    def _check_flip(self, worker: Worker, role: Role) -> None:
        if role is Role.DRAINED:
            raise OrderRefused("a worker is not flipped to drained, it is drained", status=400)
        self._check_takes_orders(worker, role)
        wanted = formats_of(rollout.known(self.intent, worker.version).worker)[role]
        if worker.kv_format != wanted:
            raise OrderRefused(
                f"{worker.worker_id} holds KV as {worker.kv_format}, {role} workers as {wanted}"
            )
        self._check_not_last(worker, role)

    def _check_takes_orders(self, worker: Worker, role: Role) -> None:
        if worker.target is role:
            raise OrderRefused(f"{worker.worker_id} is {role} already, or about to be")
        if not worker.is_connected or worker.leaves:
            raise OrderRefused(f"{worker.worker_id} is {worker.state}, and takes no orders now")

    def _check_not_last(self, worker: Worker, role: Role) -> None:
        what = last_that(worker, role, self.workers.values())
        if what is not None:
            raise OrderRefused(f"{worker.worker_id} is the last worker that {what}")

    def _known(self, worker_id: WorkerId) -> Worker:
        worker = self.workers.get(worker_id)
        if worker is None:
            there = ", ".join(sorted(self.workers)) or "none"
            raise OrderRefused(f"no worker is called {worker_id}; there are: {there}", status=404)
        return worker

    # ------------------------------------------------------------ versions

    def _on_add_version(self, event: AddVersion, now_s: float) -> Iterator[PoolEffect]:
        version = event.version
        self.intent = rollout.added(self.intent, event, self._room())
        self._stalled_s = 0.0
        what = f"is to have {_counts(version.pools)}"
        what += ", in place of all others" if event.takes_over else f" and weight {version.weight}"
        yield self._tell(now_s, version.name, what, "ordered")

    def _on_set_weights(self, event: SetWeights, now_s: float) -> Iterator[PoolEffect]:
        self.intent = rollout.weighed(self.intent, event)
        for name, weight in event.weights.items():
            yield self._tell(now_s, name, f"has weight {weight}", "ordered")

    def _on_finish(self, event: Finish, now_s: float) -> Iterator[PoolEffect]:
        self.intent = rollout.finished(self.intent, event.name, event.pools, self._room())
        self._stalled_s = 0.0
        yield self._tell(now_s, event.name, "takes over from all others", "ordered")

    def _on_abort(self, event: Abort, now_s: float) -> Iterator[PoolEffect]:
        yield from self._abort(event.name, "ordered", now_s)

    def _abort(self, name: str, why: str, now_s: float) -> Iterator[PoolEffect]:
        self.intent = rollout.aborted(self.intent, name)
        self._stalled_s = 0.0
        self.counters["updates aborted"] += 1
        yield self._tell(now_s, name, f"leaves: {self.intent.current.name} goes on", why)

    def _roll(self, now_s: float) -> Iterator[PoolEffect]:
        """One step at most: gateways are told of it before the next."""
        if len(self.intent.versions) == 1 and self.intent.rollout is None:
            return
        told = self.members.intent
        if (self.intent.versions, self.intent.rollout) != (told.versions, told.rollout):
            return  # what they said is not of this
        change = rollout.next_change(self.intent, self._scene())
        if change is not None:
            self.intent, self._stalled_s = change.intent, 0.0
            yield self._tell(now_s, change.subject, change.what, change.why)

    def _give_up_rollout(self, passed_s: float, now_s: float) -> Iterator[PoolEffect]:
        """One that comes to nothing. `passed_s` have gone by since this was asked last."""
        rolls = self.intent.rollout
        if rolls is None:
            return
        current = self.intent.current
        if current.is_over:  # it goes, and the next one is the current one then
            return
        if any(version.is_leaving for version in self.intent.versions):
            self._stalled_s = 0.0  # requests end when they end
        elif not self._fetches(rolls.to):
            self._stalled_s += passed_s
        why = self._why_hopeless(rolls.to)
        if why is None and self._stalled_s >= self.limits.update_timeout_s:
            why = f"no step in {self.limits.update_timeout_s:g} s"
        if why is None:
            return
        if current.name != rolls.to:
            self.counters["updates given up"] += 1
            yield from self._abort(rolls.to, why, now_s)
        else:  # there is nothing to go back to
            self.intent = rollout.ended(self.intent)
            yield self._tell(now_s, rolls.to, "stays as it is", why)

    def _give_up_newcomers(self, now_s: float) -> Iterator[PoolEffect]:
        """Those beside the current version that do not serve, and are not likely to."""
        if self.intent.rollout is not None or self.intent.current.is_over:
            return
        for version in self.intent.versions[1:]:
            own = [w for w in self.workers.values() if w.version == version.name]
            serves = any(w.prefills() for w in own) and any(w.decodes() for w in own)
            why = self._why_hopeless(version.name)
            if why is not None and not serves and not version.is_leaving:
                self.counters["updates given up"] += 1
                yield from self._abort(version.name, why, now_s)

    def _fetches(self, name: str) -> bool:
        """Whether a worker of that version may be fetching the model, under a deadline of its own.
        One that has run before has it.
        """
        version = self.intent.version(name)
        return (
            version is not None
            and is_remote(version.model)
            and any(
                worker.version == name
                and worker.state is WorkerState.STARTING
                and not worker.has_run
                for worker in self.workers.values()
            )
        )

    def _why_hopeless(self, name: str) -> str | None:
        """Of a version with a worker that fails again and again; not of one that failed so once and
        serves now.
        """
        for worker in self.workers.values():
            comes = worker.state in _COMING
            if worker.version == name and comes and self.restarts.is_looping(worker.worker_id):
                num_failed = self.restarts.num_failed(worker.worker_id)
                return f"{worker.worker_id} failed {num_failed} times in a row"
        return None

    def _scene(self) -> rollout.Scene:
        reports = self._gateways.reports_on(self.members.version)
        return rollout.Scene(self.workers, reports, self._room())

    def _room(self) -> int:
        """For workers that are to serve."""
        return self.limits.max_workers - sum(self._is_kept(w) for w in self.workers.values())

    # ------------------------------------------------------------ reconciling

    def _reconcile(self, now_s: float) -> Iterator[PoolEffect]:
        while (move := self._next_move()) is not None:
            yield from self._make(move, now_s)
        for worker in list(self.workers.values()):
            is_due = self.restarts.is_due(worker.worker_id, now_s)
            version = self.intent.version(worker.version)
            if worker.state is WorkerState.WAITING and is_due and version is not None:
                self._num_starts += 1
                worker.start = self._num_starts
                self._enter(worker, WorkerState.STARTING, now_s)
                assert worker.target is not None
                yield StartWorker(worker.worker_id, worker.target, worker.start, version)
        if self._gateways.have_served or self._all_serve():
            yield from self._gateways.start(now_s)

    def _next_move(self) -> Move | None:
        """Workers of versions that nobody here knows stay until a gateway has been heard: it may
        know them, and they may be all that serves.
        """
        workers = self.workers
        if self._is_unheard:
            names = {version.name for version in self.intent.versions}
            workers = {name: w for name, w in workers.items() if w.version in names}
        most = self.limits.max_workers - (len(self.workers) - len(workers))
        return next_move(workers, self.intent.versions, most)

    def _make(self, move: Move, now_s: float) -> Iterator[PoolEffect]:
        match move:
            case Drop(worker_id):
                self._forget(self.workers[worker_id])
                yield self._tell(now_s, worker_id, "is not started any more", "too many")
            case FlipTo(worker_id, role):
                worker = self.workers[worker_id]
                why = f"too many {worker.target} workers, too few {role}"
                yield from self._flip(worker, role, why, now_s)
            case Begin(version, role):
                worker_id = self._free_name(role)
                self.restarts.forget(worker_id)
                self.workers[worker_id] = Worker(worker_id, role, now_s, version=version)
                yield self._tell(now_s, worker_id, "is being started", self._lack(version, role))
            case Retire(worker_id):
                yield from self._retire(self.workers[worker_id], now_s)
            case Abandon(worker_id):
                worker = self.workers[worker_id]
                worker.target, worker.leaves = Role.DRAINED, True
                why = f"{worker.version} is over"
                yield self._tell(now_s, worker_id, "is stopped while it starts", why)
                yield self._end(worker, now_s, by_force=True)

    def _retire(self, worker: Worker, now_s: float) -> Iterator[PoolEffect]:
        worker.leaves = True
        version = self.intent.version(worker.version)
        if worker.state is WorkerState.DRAINED:
            yield self._end(worker, now_s)
        elif worker.state is not WorkerState.DRAINING:
            why = f"too many {worker.target} workers"
            if version is None or version.is_over:
                why = f"{worker.version} is over"
            yield from self._drain(worker, why, now_s)

    def _lack(self, version: str, role: Role) -> str:
        several = f" of {version}" if len(self.intent.versions) > 1 else ""
        return f"too few {role} workers{several}"

    def _flip(self, worker: Worker, role: Role, why: str, now_s: float) -> Iterator[PoolEffect]:
        self.counters["flips"] += 1
        yield self._tell(now_s, worker.worker_id, f"is flipped from {worker.role} to {role}", why)
        worker.target = role
        self._enter(worker, WorkerState.FLIPPING, now_s)
        yield SetWorkerRole(worker.worker_id, role)

    def _drain(self, worker: Worker, why: str, now_s: float) -> Iterator[PoolEffect]:
        self.counters["drains"] += 1
        yield self._tell(now_s, worker.worker_id, "is drained of its work", why)
        worker.target = Role.DRAINED
        self._enter(worker, WorkerState.DRAINING, now_s)
        yield SetWorkerRole(worker.worker_id, Role.DRAINED)

    def _give_up_flip(self, worker: Worker, why: str, now_s: float) -> Iterator[PoolEffect]:
        """It stays what it says it is; what is missing is got in another way."""
        if worker.state is not WorkerState.FLIPPING:
            return
        assert worker.target is not None
        assert worker.role is not None
        self.counters["flips failed"] += 1
        yield self._tell(now_s, worker.worker_id, f"did not become {worker.target}", why)
        worker.refuses.add(worker.target)
        worker.target = worker.role
        drained = worker.role is Role.DRAINED
        self._enter(worker, WorkerState.DRAINED if drained else WorkerState.SERVING, now_s)

    def _end(self, worker: Worker, now_s: float, *, by_force: bool = False) -> PoolEffect:
        self._enter(worker, WorkerState.STOPPING, now_s)
        worker.is_connected, worker.lost_s, worker.load = False, None, None
        return StopWorker(worker.worker_id, by_force=by_force)

    def _end_unborn(self, worker: Worker, now_s: float) -> Iterator[PoolEffect]:
        """One that is not there yet, or not quite."""
        if worker.state is WorkerState.WAITING:
            self._forget(worker)
            yield self._tell(now_s, worker.worker_id, "is not started any more", "ordered")
        else:
            yield self._tell(now_s, worker.worker_id, "is stopped while it starts", "ordered")
            yield self._end(worker, now_s, by_force=True)

    def _lose(self, worker: Worker, how: str, now_s: float) -> Iterator[PoolEffect]:
        """It is gone and is wanted."""
        outlook = self.restarts.note_end(worker.worker_id, now_s)
        yield self._tell(now_s, worker.worker_id, how, outlook)
        self._wait(worker, now_s)

    def _wait(self, worker: Worker, now_s: float) -> None:
        """For its next start. What was known of it is forgotten, but that it has run."""
        name = worker.worker_id
        self.workers[name] = Worker(
            name, worker.target, now_s, version=worker.version, has_run=worker.has_run
        )

    # ------------------------------------------------------------ books

    def _publish(self) -> Iterator[PoolEffect]:
        kept = tuple(sorted(w.worker_id for w in self.workers.values() if self._is_kept(w)))
        self.intent = msgspec.structs.replace(self.intent, drained=kept)
        workers = tuple(
            Member(worker.worker_id, worker.address, worker.version, worker.context_len)
            for worker in sorted(self.workers.values(), key=lambda w: w.worker_id)
            if worker.state in _RUNNING and worker.address is not None
        )
        if (workers, self.intent) != (self.members.workers, self.members.intent):
            self.members = Members(self.members.version + 1, workers, self.intent)
            yield Publish(self.members)

    def _is_kept(self, worker: Worker) -> bool:
        """Whether the operator wants it to stay, and without work."""
        if worker.target is None:
            return worker.worker_id in self.intent.drained
        return worker.target is Role.DRAINED and not worker.leaves

    def _tell(self, now_s: float, subject: str, what: str, why: str = "") -> Tell:
        self._num_steps += 1
        what = what.removeprefix(f"{subject} ")
        step = Step(self._num_steps, now_s, subject, what, why)
        self.history.append(step)
        return Tell(step)

    def _enter(self, worker: Worker, state: WorkerState, now_s: float) -> None:
        worker.state, worker.since_s = state, now_s

    def _forget(self, worker: Worker) -> None:
        del self.workers[worker.worker_id]
        self.restarts.forget(worker.worker_id)

    def _starting(self, worker_id: WorkerId, start: int) -> Worker | None:
        """The worker, if this is the start that is waited for."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.state is not WorkerState.STARTING or worker.start != start:
            return None
        return worker

    def _at(self, worker_id: WorkerId, address: str) -> Worker | None:
        """The worker, if it is still the one at that address."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.address != address or worker.state not in _RUNNING:
            return None
        return worker

    def _free_name(self, role: Role) -> WorkerId:
        number = 0
        while WorkerId(f"{role}-{number}") in self.workers:
            number += 1
        return WorkerId(f"{role}-{number}")


def _counts(pools: Pools) -> str:
    return " ".join(f"{role}={pools.of(role)}" for role in SERVING_ROLES)
