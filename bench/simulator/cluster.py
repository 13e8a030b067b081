"""Simulates a cluster: the real router machine and simulated workers play a trace.

In addition to the router machine and the workers' cores, the simulation has a clock with a heap of
future events, prices for steps and pulls, and rules that turn effects into events. This module
makes no scheduling decision.

Workers send frames to the gateway, like live workers. Each message takes `latency_s` in either
direction, including block events. The machine is woken at the times that it requests.

Each node may have a store, which takes in blocks of the node's workers (see `stores`). The gateway
and the stores receive a frame at the same time.

Workers skip over equal steps and report many tokens at once (see `workers`). If `settles` is on,
the machine receives all tokens generated so far before each placement. If `settles` is off, it
receives tokens up to a second late, which is faster for large clusters.
"""

import dataclasses
import gc
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from msgspec.structs import replace

from bench.simulator.crowd import NO_CHANCES, Chances, Crowd
from bench.simulator.hardware import HardwareProfile
from bench.simulator.pools import (
    AFTER_S,
    EVERY_S,
    SAMPLED_EVERY_S,
    Evenness,
    SimulatedDecision,
    SimulatedPlanner,
)
from bench.simulator.prompts import SimulatedPrompts
from bench.simulator.stores import SimStore, StoreRecord, store_of
from bench.simulator.tiers import SimulatedStores
from bench.simulator.traces import Trace, TraceRequest, with_ids
from bench.simulator.transfers import Future, Rank, Transfers
from bench.simulator.workers import Frame, Said, SimWorker
from engine.messages import (
    BlocksOffered,
    Cancel,
    Decode,
    GatewayId,
    Generate,
    GivenBack,
    Hello,
    Limits,
    OfferBlocks,
    Prefill,
    RequestId,
    Role,
    RoleChanged,
    Sampling,
    SeqId,
    Tokens,
    WorkerId,
)
from engine.worker.events import Event, FromGateway
from router.machine.events import (
    Arrived,
    BlocksChanged,
    FromWorker,
    RouterEvent,
    Stepped,
    Tick,
    WorkerJoined,
)
from router.machine.flight import BALANCED
from router.machine.machine import RouterMachine
from router.machine.requests import Outcome, Request, Timeline, Update
from router.planning.planner import PlannerRules

GATEWAY = GatewayId("gateway")
_BEGINS = (Prefill, Generate, Decode)
_MAKES_ROOM = (GivenBack, RoleChanged)
_MAY_QUEUE = (Arrived, Tick)
_Begins = Prefill | Generate | Decode
MAX_ANSWER_TOKENS = 2048  # answer limit of clients that do not know the length of their answer
MAX_SETTLED_WORKERS = 16  # in clusters with more workers, `settles` is off by default


@dataclass(frozen=True, slots=True)
class SimulatedPools:
    """The number of workers of each role."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @property
    def total(self) -> int:
        """Returns the number of workers of all roles."""
        return self.prefill + self.decode + self.mixed


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """What is simulated, except the router machine and the trace."""

    hardware: HardwareProfile
    pools: SimulatedPools
    latency_s: float = 2e-4  # seconds of a message between gateway and worker
    # answer limit of clients; None: each request's answer length
    max_answer_tokens: int | None = None
    chances: Chances = NO_CHANCES  # random variations of prices and latencies
    stretch: float | None = None  # fluid pools: the `stretch` of `engine.messages.Welcome`
    leaps: bool = True  # True: workers skip over equal steps (see `SimWorker`)
    settles: bool | None = None  # None: True if there are few workers (MAX_SETTLED_WORKERS)
    rules: PlannerRules | None = None  # None: the planner does not change the pools
    # time at which the last decode worker joins; None: it runs from the start
    joins_s: float | None = None
    stores: SimulatedStores | None = None  # settings of the stores, one per node; None: no stores


@dataclass(slots=True)
class SimulatedRequest:
    """One request and its result, as the gateway observed it."""

    asked: TraceRequest
    outcome: Outcome | None = None
    timeline: Timeline | None = None
    # times of the answer's tokens
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    ended_s: float = math.nan


OnEnd = Callable[[int, SimulatedRequest], None]
# Returns the next request for the given time, or None if there are no more requests.
Ask = Callable[[float], TraceRequest | None]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The counts of one worker's work."""

    worker_id: WorkerId
    role: Role
    busy_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The results of a simulation."""

    trace: Trace
    setup: SimulationSetup
    records: Sequence[SimulatedRequest]
    workers: Sequence[WorkerRecord]
    duration_s: float
    num_events: int
    decisions: Sequence[SimulatedDecision] = ()  # the planner's decisions
    evenness: Evenness | None = None  # balance of the decode workers after a late worker has joined
    num_moved: int = 0  # number of sequences that moved from a full worker to a less busy one
    stores: Sequence[StoreRecord] = ()  # state of the stores when the last request ended


def simulate(trace: Trace, setup: SimulationSetup, machine: RouterMachine) -> SimulatedRun:
    """Plays a trace on an idle, empty cluster until all requests have ended. Returns the run."""
    trace = with_ids(trace)
    records: dict[int, SimulatedRequest] = {}
    run = simulate_stream(trace, trace.requests, setup, machine, records.__setitem__)
    return dataclasses.replace(run, records=[records[i] for i in range(len(trace.requests))])


def simulate_stream(
    trace: Trace,
    requests: Iterable[TraceRequest],
    setup: SimulationSetup,
    machine: RouterMachine,
    ended: OnEnd,
) -> SimulatedRun:
    """Plays requests without keeping them in memory. Every request must have block ids. The run has
    no records.

    `trace` has the block size. `ended` is called with each finished request and its number in order
    of arrival.
    """
    return _play(_Cluster(trace, in_order(requests), setup, machine, ended))


def in_order(requests: Iterable[TraceRequest]) -> Ask:
    """Returns an `Ask` that returns these requests in order, independent of the time."""
    coming = iter(requests)
    return lambda _now_s: next(coming, None)


def simulate_clients(
    num_clients: int, ask: Ask, block_tokens: int, setup: SimulationSetup, machine: RouterMachine
) -> SimulatedRun:
    """Plays a closed loop: each client sends its next request as soon as it has its complete
    answer.

    `ask` returns the next request of a free client, whose block ids stand for blocks of
    `block_tokens`. After `ask` has returned None, it must always return None.
    """
    records: list[SimulatedRequest] = []
    trace = Trace("clients", block_tokens, ())
    cluster = _Cluster(
        trace, ask, setup, machine, lambda _, one: records.append(one), num_clients=num_clients
    )
    return dataclasses.replace(_play(cluster), records=records)


def _play(cluster: "_Cluster") -> SimulatedRun:
    with _uncollected():
        cluster.run()
    cluster.validate()
    return cluster.result()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turns off the cyclic garbage collector: there are millions of objects, and hardly any
    cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Cluster:
    def __init__(
        self,
        trace: Trace,
        ask: Ask,
        setup: SimulationSetup,
        machine: RouterMachine,
        ended: OnEnd,
        *,
        num_clients: int | None = None,
    ) -> None:
        self._trace = trace
        self._ask = ask
        self._num_clients = num_clients  # clients of a closed loop; None: requests have fixed times
        self._on_ended = ended
        self._setup = setup
        self._machine = machine
        self._future = Future()
        self._transfers = Transfers(
            self._future, setup.hardware.pull, setup.hardware.layout, latency_s=setup.latency_s
        )
        self._prompts = SimulatedPrompts(trace, setup.hardware.layout.block_size)
        self._records: dict[RequestId, SimulatedRequest] = {}  # records of live requests
        self._num_asked = 0
        self._all_came = False
        self._num_waiting = 0  # requests in the machine that wait for a worker or for a move
        self._ended_s = 0.0
        self._wake_s: float | None = None
        self._evenness: Evenness | None = None  # set when a late worker joins
        self._crowd = Crowd(setup.hardware, self._future, setup.chances)
        self._arrives_s: dict[WorkerId, float] = {}  # arrival of the last message to each
        self._workers = {
            worker_id: SimWorker(
                worker_id,
                role,
                hardware=setup.hardware,
                future=self._future,
                transfers=self._transfers,
                listener=self,
                read=self._prompts.read,
                leaps=setup.leaps and not self._crowd.watches,
                crowd=self._crowd,
                stretch=setup.stretch,
            )
            for worker_id, role in _names(setup.pools)
        }
        self._stores = {
            store_id: SimStore(
                store_id,
                stores,
                hardware=setup.hardware,
                future=self._future,
                transfers=self._transfers,
                listener=self,
                read=self._prompts.read,
            )
            for store_id, stores in _stores(setup)
        }
        self._near = _nodes(list(self._workers), list(self._stores.values()), setup.stores)
        self._store_records: Sequence[StoreRecord] = ()
        settles = setup.settles
        self._settles = setup.pools.total <= MAX_SETTLED_WORKERS if settles is None else settles
        self._planned = None if setup.rules is None else SimulatedPlanner(setup.rules, machine)
        # workers that decode, or have decoded before a change of role
        self._decoding = [w for w in self._workers.values() if w.role.decodes]

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Runs from the first arrival until all answers are complete and every worker is idle."""
        joins_s, late = self._setup.joins_s, None
        if joins_s is not None:
            late = [w for w in self._workers.values() if w.role is Role.DECODE][-1]
            self._future.plan(joins_s, Rank.ROUTINE, self._on_late_join, late)
        for store in self._stores.values():
            self._handle(WorkerJoined(store.welcome()))
            for other in self._near[store.worker_id]:
                other.meet(store.worker_id, is_store=True)
        for worker in self._workers.values():
            if worker is not late:
                self._join(worker)
        for _ in range(self._num_clients or 1):
            self._plan_arrival()
        if self._planned is not None:
            self._on_plan_due(self._planned)
        if self._goes_on:
            self._future.run()
            assert not self._goes_on, "requests are open and nothing will happen"
        self._ended_s = self._future.now_s
        self._store_records = [store.record() for store in self._stores.values()]
        for worker in self._workers.values():
            worker.reports = False
        for store in self._stores.values():
            store.reports = False
        for worker_id, near in self._near.items():
            for store in near:
                # the store stops taking in blocks, because otherwise the run would not end
                store.miss(worker_id)
        self._future.run()

    def _join(self, worker: SimWorker) -> None:
        self._handle(WorkerJoined(worker.welcome()))
        for store in self._near.get(worker.worker_id, ()):
            store.meet(worker.worker_id, is_store=False)
        worker.receive([])

    def _on_late_join(self, worker: SimWorker) -> None:
        self._join(worker)
        self._evenness = Evenness(self._future.now_s)
        self._on_sample_due(self._evenness)

    def _on_sample_due(self, evenness: Evenness) -> None:
        now_s = self._future.now_s
        evenness.sample(self._machine, now_s)
        if self._goes_on and now_s < evenness.began_s + AFTER_S:
            self._future.plan(now_s + SAMPLED_EVERY_S, Rank.ROUTINE, self._on_sample_due, evenness)

    def validate(self) -> None:
        """Asserts that no worker holds a block or a lease, and that no store holds a lease."""
        assert self._transfers.num_leases == 0
        for store in self._stores.values():
            store.validate()
        for worker in self._workers.values():
            _check_idle(worker)

    def result(self) -> SimulatedRun:
        """Returns the results. Call it after `run`."""
        workers = [_record_of(worker) for worker in self._workers.values()]
        return SimulatedRun(
            self._trace,
            self._setup,
            (),
            workers,
            self._ended_s,
            self._future.num_events,
            () if self._planned is None else self._planned.decisions,
            self._evenness,
            self._machine.counters["moved", BALANCED],
            self._store_records,
        )

    def _on_plan_due(self, planned: SimulatedPlanner) -> None:
        if not self._goes_on:
            return
        now_s = self._future.now_s
        for worker_id, message in planned.tick(now_s):
            self._send(worker_id, [FromGateway(GATEWAY, message)])
        self._future.plan(now_s + EVERY_S, Rank.ROUTINE, self._on_plan_due, planned)

    # ------------------------------------------------------------ clients

    @property
    def _goes_on(self) -> bool:
        """Returns True until the last request has ended."""
        return bool(self._records) or not self._all_came

    def _plan_arrival(self) -> float | None:
        """Plans the arrival of the next request. Returns its time, or None if there is none."""
        asked = self._ask(self._future.now_s)
        if asked is None:
            self._all_came = True
            return None
        arrival = (self._num_asked, asked)
        self._num_asked += 1
        self._future.plan(asked.arrived_s, Rank.MESSAGE, self._on_arrival, arrival)
        return asked.arrived_s

    def _on_arrival(self, arrival: tuple[int, TraceRequest]) -> None:
        index, asked = arrival
        request_id = RequestId(str(index))
        self._records[request_id] = SimulatedRequest(asked)
        next_s = self._plan_arrival() if self._num_clients is None else None
        sampling = Sampling(temperature=0.0, seed=index)
        token_ids, hashes = self._prompts.open(request_id, asked, sampling)
        request = Request(
            request_id=request_id,
            # or an `Unwritten`, which has the methods of a tuple
            token_ids=cast("tuple[int, ...]", token_ids),
            sampling=sampling,
            limits=_limits(asked, self._setup.max_answer_tokens),
            received_s=self._future.now_s,
            hashes=hashes,
        )
        self._handle(Arrived(request, more_come=next_s == self._future.now_s))

    # ------------------------------------------------------------ the gateway

    def on_frame(self, worker_id: WorkerId, frame: Frame) -> None:
        """Plans the arrival of a frame that a worker sends at this moment."""
        at_s = self._future.now_s + self._setup.latency_s
        self._future.plan(at_s, Rank.MESSAGE, self._on_frame, (worker_id, frame))

    def _on_frame(self, heard: tuple[WorkerId, Frame]) -> None:
        worker_id, frame = heard
        if frame.blocks:
            self._take(BlocksChanged(worker_id, frame.blocks))
            for store in self._near.get(worker_id, ()):
                store.follow(worker_id, frame.blocks)
        self._settle()
        told: list[Said] = []
        for said in frame.said:
            message = said.message
            if isinstance(message, Tokens) and message.finish is None:
                told.append(said)
                continue
            if told:
                self._on_tokens(worker_id, told)
                told = []
            if isinstance(message, BlocksOffered):
                self._stores[store_of(message.seq_id)].answered(worker_id, message)
                continue
            if isinstance(message, RoleChanged):
                worker = self._workers[worker_id]
                if worker not in self._decoding:  # its new role may be decode
                    self._decoding.append(worker)
            if isinstance(message, _MAKES_ROOM):
                self._settle(places=True)
            self._take(FromWorker(worker_id, message), said.times_s)
        if told:
            self._on_tokens(worker_id, told)

    def ask(self, store_id: WorkerId, worker_id: WorkerId, message: OfferBlocks | Cancel) -> None:
        """Plans the arrival of a message from a store at a worker."""
        self._send(worker_id, [FromGateway(GatewayId(store_id), message)])

    def _send(self, worker_id: WorkerId, events: list[Event]) -> None:
        """Plans the arrival of messages, after that of earlier messages to the same peer."""
        at_s = self._future.now_s + self._setup.latency_s
        if self._crowd.varies:
            messages = (event.message for event in events if isinstance(event, FromGateway))
            at_s += max((self._crowd.delay_s(m) for m in messages), default=0.0)
            at_s = max(at_s, self._arrives_s.get(worker_id, 0.0))
            self._arrives_s[worker_id] = at_s
        side = self._stores.get(worker_id) or self._workers[worker_id]
        self._future.plan(at_s, Rank.MESSAGE, side.receive, events)

    def _handle(self, event: RouterEvent) -> None:
        self._settle(places=isinstance(event, Arrived))
        self._take(event)

    def _settle(self, *, places: bool = False) -> None:
        """Before a placement, reports the generated tokens to the machine."""
        if not self._settles or not (places or self._num_waiting):
            return
        until_s = self._future.now_s - self._setup.latency_s
        for worker in self._decoding:
            if told := worker.settle(until_s):
                self._on_tokens(worker.worker_id, told)

    def _on_tokens(self, worker_id: WorkerId, told: Sequence[Said]) -> None:
        """Delivers tokens of answers that are not complete yet."""
        tokens = cast("list[Tokens]", [one.message for one in told])
        effects = self._machine.handle(Stepped(worker_id, tokens), self._future.now_s)
        if len(effects) < len(told):  # the other tokens belong to attempts that have ended
            here = {effect.request_id for effect in effects if isinstance(effect, Update)}
            told = [one for one in told if request_of(tokens_of(one).seq_id) in here]
        for effect, one in zip(effects, told, strict=True):
            assert isinstance(effect, Update)
            self._records[effect.request_id].times_s.extend(one.times_s)

    def _take(self, event: RouterEvent, times_s: Sequence[float] = ()) -> None:
        """Passes an event to the machine. `times_s` are the times of the event's tokens."""
        effects = self._machine.handle(event, self._future.now_s)
        frames: dict[WorkerId, list[Event]] = {}
        for effect in effects:
            if isinstance(effect, Update):  # checked first, because most effects are updates
                if effect.token_ids:
                    assert len(effect.token_ids) == len(times_s)
                    self._records[effect.request_id].times_s.extend(times_s)
                if effect.outcome is not None:
                    assert effect.timeline is not None
                    self._prompts.close(effect.request_id)
                    self._end(effect.request_id, effect.outcome, effect.timeline)
            else:
                events = frames.setdefault(effect.worker_id, [])
                message = effect.message
                if isinstance(message, _BEGINS) and self._setup.max_answer_tokens is not None:
                    asked = self._records[request_of(message.seq_id)].asked
                    message = _as_it_ends(message, asked)
                if not isinstance(message, Hello):
                    events.append(FromGateway(GATEWAY, message))
        for worker_id, events in frames.items():
            self._send(worker_id, events)
        num_stranded = self._machine.num_stranded
        if frames or num_stranded or isinstance(event, _MAY_QUEUE):
            self._num_waiting = self._machine.queue_len + num_stranded
        if frames or self._num_waiting:  # only then can the machine have a new deadline
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Plans an earlier wake-up of the machine, if the machine requests one."""
        at_s = self._machine.next_wake_s()
        if at_s is not None and (self._wake_s is None or at_s < self._wake_s):
            self._wake_s = at_s
            self._future.plan(max(at_s, self._future.now_s), Rank.ROUTINE, self._on_wake, at_s)

    def _on_wake(self, at_s: float) -> None:
        if at_s != self._wake_s or not self._goes_on:
            return  # an earlier wake-up has replaced this one
        self._wake_s = None
        due_s = self._machine.next_wake_s()
        if due_s is not None and due_s <= self._future.now_s:
            self._handle(Tick())
        self._look_ahead()

    def _end(self, request_id: RequestId, outcome: Outcome, timeline: Timeline) -> None:
        record = self._records.pop(request_id)
        record.outcome, record.timeline = outcome, timeline
        record.ended_s = self._future.now_s
        # Until here, times are the workers'. From here, they are times of receipt by the gateway.
        np.asarray(record.times_s)[:] += self._setup.latency_s
        self._on_ended(int(request_id), record)
        if self._num_clients is not None:
            self._plan_arrival()
        if not self._goes_on:
            self._future.stop()


def _check_idle(worker: SimWorker) -> None:
    """Asserts that a worker holds no block."""
    worker.core.validate()
    counts = worker.pool.counts()
    assert counts.free + counts.cached == counts.total, f"{worker.worker_id} leaks"


def _record_of(worker: SimWorker) -> WorkerRecord:
    return WorkerRecord(worker.worker_id, worker.role, worker.busy_s, worker.num_steps)


def tokens_of(said: Said) -> Tokens:
    """Casts a message to the type Tokens."""
    assert isinstance(said.message, Tokens)
    return said.message


def request_of(seq_id: SeqId) -> RequestId:
    """Returns the id of the request that a sequence belongs to."""
    return RequestId(seq_id[: seq_id.index(".")])


def _limits(asked: TraceRequest, max_answer_tokens: int | None = None) -> Limits:
    output_len = max(asked.output_len, max_answer_tokens or 0)
    return Limits(max_len=asked.input_len + output_len, prompt_len=asked.input_len)


def _as_it_ends(message: _Begins, asked: TraceRequest) -> _Begins:
    """Replaces the answer limit by the true length, at which the model would end the answer.

    A copy of a prompt generates no answer, so it is not changed.
    """
    if isinstance(message, Decode) and message.is_copy:
        return message
    return replace(message, limits=replace(_limits(asked), tpot_s=message.limits.tpot_s))


def _stores(setup: SimulationSetup) -> Iterator[tuple[WorkerId, SimulatedStores]]:
    """Yields the name and the settings of the store of each node."""
    if setup.stores is not None:
        for index in range(setup.stores.num_nodes(setup.pools.total)):
            yield WorkerId(f"store-{index}"), setup.stores


def _names(pools: SimulatedPools) -> Iterable[tuple[WorkerId, Role]]:
    parts = ((Role.PREFILL, pools.prefill), (Role.DECODE, pools.decode), (Role.MIXED, pools.mixed))
    roles = [role for role, number in parts for _ in range(number)]
    width = len(str(len(roles) - 1))
    for index, role in enumerate(roles):
        yield WorkerId(f"worker-{index:0{width}}"), role


def _nodes(
    worker_ids: Sequence[WorkerId], stores: Sequence[SimStore], setup: SimulatedStores | None
) -> dict[WorkerId, list[SimStore]]:
    """Returns the stores that follow each worker or store. A worker is followed by the store of its
    node, a store by all other stores.

    A node has workers that are neighbours in the order of names.
    """
    if setup is None:
        return {}
    near = {worker_id: [stores[i // setup.node_workers]] for i, worker_id in enumerate(worker_ids)}
    others = {each.worker_id: [one for one in stores if one is not each] for each in stores}
    return near | others
