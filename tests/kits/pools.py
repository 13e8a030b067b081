"""The pool machine with fake workers, gateways and a fake clock, without processes."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from deploy.pools.events import (
    Connected,
    Died,
    Disconnected,
    Found,
    GatewayHeard,
    GatewaySeen,
    LoadSeen,
    NodesSeen,
    PoolTick,
    Publish,
    RoleSeen,
    ServiceFailed,
    ServiceStarted,
    ServiceStopped,
    SetWorkerRole,
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
from deploy.pools.formats import formats_of
from deploy.pools.gateways import GatewayState
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import OrderRefused
from deploy.pools.state import PoolLimits
from deploy.pools.workers.record import WorkerState
from engine.config import PoolsConfig, WorkerConfig
from engine.control import GatewayReport, HistoryStep, Intent, Member, Pools, Version, VersionReport
from engine.layout import KVFormat
from engine.messages import LoadReport, Role, WorkerId

CONTEXT_LEN = 4096  # tokens
SAME = WorkerConfig()
APART = WorkerConfig(decode_kv_dtype=KVFormat.INT8)
IDLE = LoadReport(8, 0, 0, 0, 0, 0, 0, 0)
BUSY = LoadReport(8, 0, 0, 0, 0, 1, 1, 0)


ONE_EACH = Pools(1, 1)
NONE_BESIDE: Mapping[str, Any] = MappingProxyType({})


def model_version(name: str, pools: Pools) -> Version:
    """Returns the first version of a model beside the main one."""
    return Version(f"{name}-v1", name, name, pools=pools, line=name)


class FakePoolProcess:
    """A worker that obeys an order at once and answers after a delay."""

    def __init__(self, role: Role, version: str, kv_format: KVFormat) -> None:
        self.role = role
        self.version = version
        self.kv_format = kv_format
        self.refuses: set[Role] = set()
        self.is_deaf = False
        self.is_stuck = False  # true: never reports that it is idle
        self.is_mute = False  # ignores orders
        self.num_decoding = 0  # number of sequences


class PoolWorld:
    """A machine with a fake launcher, workers and clock: effects become events after a delay."""

    def __init__(
        self,
        pools: Pools = ONE_EACH,
        max_workers: int = 8,
        config=SAME,
        gateways=("gateway",),
        num_spares: int = 0,
        others: Mapping[str, Pools] = NONE_BESIDE,
        idle_s: Mapping[str, float] = NONE_BESIDE,
        nodes: tuple[str, ...] = (),
        update_timeout_s: float = 900.0,
    ) -> None:
        """`others` are further models with their pools; `idle_s` applies to these models.

        With `nodes`, each node has a store for each version.
        """
        self.now_s = 0.0
        limits = PoolLimits(
            max_workers,
            pools=PoolsConfig(
                spares=num_spares, drain_timeout_s=20, update_timeout_s=update_timeout_s
            ),
            idle_s=idle_s,
            gateways_share_socket=len(gateways) > 1,
            has_stores=bool(nodes),
        )
        main = Version(worker=config, pools=pools)
        intent = Intent((main, *(model_version(name, own) for name, own in others.items())))
        self.machine = PoolMachine(intent, limits=limits, gateways=gateways)
        self.rng = random.Random(1)
        self.processes: dict[str, FakePoolProcess] = {}
        # dead processes whose death is not reported yet
        self.unheard: dict[str, FakePoolProcess] = {}
        self.addresses: dict[str, str] = {}
        self.queue: list[tuple[float, int, object]] = []
        self.number = count()
        self.requests: Counter[str] = Counter()  # running requests, by version
        # ended, failed and late requests in each second, by version
        self.ends: dict[str, tuple[int, int, int]] = {}
        self.ended: dict[str, list[int]] = {}  # totals of `ends`, by version
        self.hung: dict[str, int] = {}  # answers that hang, by version
        self.longest_len: dict[str, int] = {}  # longest sequence length, by version
        self.probes: dict[str, str | None] = {}  # the gateways' probe results, by version
        self.missing: dict[str, str] = {}  # reasons why gateways cannot serve a version
        self.silent: set[str] = set()  # gateways that send no report
        self.hanging: set[str] = set()  # gateways that are never reached
        self.fails: list[str] = []  # reasons why the next starts fail
        self.start_s = 0.5  # seconds from order to start
        self.bad_versions: set[str] = set()  # versions that never start
        self.unreachable_versions: set[str] = set()  # versions whose workers are never reached
        self.fails_always: set[Role] = set()
        self.has_no_place: set[str] = set()  # workers that fit only on another node
        self.started: list[tuple[float, str]] = []
        self.stopped_gateways: list[tuple[float, str]] = []
        self.told: list[str] = []
        self.stores: dict[str, str] = {}  # running stores and their versions
        self.retired: list[str] = []  # names of stores whose blocks were removed
        self.failing_stores: set[str] = set()
        if nodes:
            self.feed(NodesSeen(nodes))

    # -------------------------------------------------------- passing of time

    def later(self, event: object, delay_s: float | None = None) -> None:
        delay_s = self.rng.uniform(0.01, 1.5) if delay_s is None else delay_s
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.number), event))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            next_tick_s = self.now_s + 1
            while self.queue and self.queue[0][0] <= next_tick_s:
                self.now_s, _, event = heapq.heappop(self.queue)
                self.feed(event)
            self.now_s = next_tick_s
            for name, process in list(self.processes.items()):
                if not process.is_deaf:
                    load = BUSY if process.is_stuck else IDLE
                    load = msgspec.structs.replace(load, decode_seqs=process.num_decoding)
                    self.feed(LoadSeen(WorkerId(name), self.addresses[name], load))
            self.report()
            self.feed(PoolTick())

    def pass_quietly(self, seconds: float) -> None:
        """Advances the time without reports and ticks."""
        assert not self.queue
        self.now_s += seconds

    def report(self) -> None:
        """Makes serving gateways report the workers that they know."""
        members = self.machine.members
        for name, ends in self.ends.items():
            sums = self.ended.setdefault(name, [0, 0, 0])
            if (version := members.intent.version(name)) is not None and version.weight:
                self.ended[name] = [total + each for total, each in zip(sums, ends, strict=True)]
        versions = {
            version.name: VersionReport(
                self.missing.get(version.name),
                self.requests[version.name],
                "fp",
                *self.ended.get(version.name, (0, 0, 0)),
                self.longest_len.get(version.name, 0),
                self.probes.get(version.name, ""),
                self.hung.get(version.name, 0),
            )
            for version in members.intent.versions
        }
        report = GatewayReport(None, members.version, 2, 0, 0, 0.0, versions=versions)
        for name, state in self.machine.gateways.items():
            if state is GatewayState.SERVING and name not in self.silent:
                self.feed(GatewaySeen(name, report))

    def settle(self, seconds: float = 400) -> None:
        self.run_until(lambda: self.machine.is_settled, seconds)

    def run_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        end_s = self.now_s + seconds
        while not is_so():
            assert self.now_s < end_s, (self.machine.workers, self.machine.intent, self.told[-20:])
            self.run(1)

    def feed(self, event: object) -> None:
        if isinstance(event, Died):
            self.unheard.pop(event.name, None)
        for effect in self.machine.handle(event, self.now_s):
            self.perform(effect)
        self.machine.validate()

    def perform(self, effect: object) -> None:
        match effect:
            case StartWorker():
                self.start(effect)
            case StopWorker(worker_id):
                self.check_not_last(worker_id, Role.DRAINED)
                self.processes.pop(worker_id, None)
                self.later(WorkerStopped(worker_id))
            case SetWorkerRole(worker_id, role):
                self.set_role(worker_id, role)
            case StartGateway(name):
                self.later(ServiceStarted(name), 0.5)
                if name not in self.hanging:
                    self.later(GatewayHeard(name), 0.6)
            case StopGateway(name):
                self.stopped_gateways.append((self.now_s, name))
                self.later(ServiceStopped(name))
            case StartStore(name, version):
                assert name not in self.stores
                if name in self.failing_stores:
                    self.later(ServiceFailed(name, "no memory"), 0.1)
                    return
                self.stores[name] = version.name
                self.later(ServiceStarted(name, f"{name}:1"), 0.3)
            case StopStore(name, is_over):
                del self.stores[name]
                self.retired += [name] if is_over else []
                self.later(ServiceStopped(name))
            case HistoryStep() as step:
                self.told.append(str(step))
            case Publish(members):
                assert members == self.machine.members

    def start(self, wanted: StartWorker) -> None:
        worker_id, role, start = wanted.worker_id, wanted.role, wanted.start
        assert len(self.processes) < self.machine.limits.max_workers
        assert worker_id not in self.processes
        self.started.append((self.now_s, worker_id))
        if worker_id in self.has_no_place:
            self.later(WorkerStartFailed(worker_id, start, "no node", waits_for_node=True))
            return
        is_bad = role in self.fails_always or wanted.version.name in self.bad_versions
        if self.fails or is_bad:
            reason = self.fails.pop() if self.fails else "it never does"
            self.later(WorkerStartFailed(worker_id, start, reason))
            return
        address = f"{worker_id}@{start}"
        holds = Role.DECODE if role is Role.DRAINED else role
        kv_format = formats_of(wanted.version)[holds]
        self.processes[worker_id] = FakePoolProcess(role, wanted.version.name, kv_format)
        self.addresses[worker_id] = address
        self.later(WorkerStarted(worker_id, start, address, CONTEXT_LEN), self.start_s)
        if wanted.version.name in self.unreachable_versions:
            self.processes[worker_id].is_deaf = True
        else:
            connected = Connected(worker_id, address, role, kv_format)
            self.later(connected, self.start_s + 0.1)

    def set_role(self, worker_id: str, role: Role) -> None:
        process = self.processes.get(worker_id)
        if process is None or process.is_deaf or process.is_mute:
            return
        self.check_not_last(worker_id, role)
        if role not in process.refuses:
            process.role = role
        self.later(RoleSeen(WorkerId(worker_id), self.addresses[worker_id], process.role))

    def check_not_last(self, worker_id: str, role: Role) -> None:
        """Asserts that after an order a prefill worker and a decode worker remain.

        A version that is being removed is exempt.
        """
        process = self.processes.get(worker_id)
        if process is None or process.is_deaf:
            return
        version = self.machine.intent.version(process.version)
        # its requests wait until the version is awake
        if version is not None and version.asleep is not None:
            return
        if version is None or version.is_over:
            assert not self.requests[process.version]
            return
        others = [
            other
            for name, other in {**self.processes, **self.unheard}.items()
            if name != worker_id and not other.is_deaf and other.version == process.version
        ]
        for does in ("prefills", "decodes"):
            if getattr(process.role, does) and not getattr(role, does):
                assert any(getattr(p.role, does) for p in others), (worker_id, role)

    def die(self, worker_id: str) -> None:
        self.unheard[worker_id] = self.processes.pop(worker_id)
        self.later(Died(worker_id, f"{worker_id} ended"), 0.2)

    def hang(self, worker_id: str) -> None:
        self.processes[worker_id].is_deaf = True
        address = self.addresses[worker_id]
        self.feed(Disconnected(WorkerId(worker_id), address, "silence"))

    def connect(self, *worker_ids: str) -> None:
        """Makes the gateways connect to these workers, by default to all workers."""
        for name in worker_ids or list(self.processes):
            process, address = self.processes[name], self.addresses[name]
            self.feed(Connected(WorkerId(name), address, process.role, process.kv_format))

    def replace_controller(self, intent: Intent, gateways=("gateway",), **known) -> None:
        """Starts the next controller, which finds all workers and the given gateways running."""
        self.machine = PoolMachine(
            intent, limits=self.machine.limits, gateways=["gateway"], **known
        )
        workers = tuple(
            Member(WorkerId(name), self.addresses[name], process.version, CONTEXT_LEN)
            for name, process in self.processes.items()
        )
        self.feed(Found(workers, gateways))

    # -------------------------------------------------------- state of the world

    def roles(self) -> dict[str, Role]:
        return {name: p.role for name, p in sorted(self.processes.items())}

    def states(self) -> dict[str, WorkerState]:
        return {name: w.state for name, w in self.machine.workers.items()}


def intent_of(pools: Pools, **fields) -> Intent:
    """Returns an intent of one version with these pools."""
    return Intent((Version(pools=pools),), **fields)


def settled(*arguments, **options) -> PoolWorld:
    """Returns a world whose pools have reached their target size."""
    world = PoolWorld(*arguments, **options)
    world.feed(PoolTick())
    world.settle()
    world.told.clear()
    world.started.clear()
    return world


def check_refused(world: PoolWorld, order: object, *, reason: str, status: int) -> None:
    """Asserts that the machine refuses an order for this reason and changes no state."""
    before = world.machine.members
    with pytest.raises(OrderRefused, match=reason) as caught:
        world.feed(order)
    assert caught.value.status == status
    assert world.machine.members == before
    assert world.machine.is_settled
