"""The machine of the pools: it converges, never takes the last worker, never starts too many."""

import heapq
import random
from collections import Counter
from itertools import count, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.pools.effects import (
    Publish,
    SetWorkerRole,
    StartGateway,
    StartWorker,
    StopGateway,
    StopWorker,
    Tell,
)
from deploy.pools.events import (
    Connected,
    Died,
    Disconnected,
    Found,
    GatewayFailed,
    GatewayHeard,
    GatewaySeen,
    GatewayStarted,
    GatewayStopped,
    GatewayUnheard,
    LoadSeen,
    Overtaken,
    PoolTick,
    RoleSeen,
    RoomSeen,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from deploy.pools.formats import formats_of
from deploy.pools.gateways import GATEWAY_UNREACHABLE_S, GatewayState
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Drain, Flip, OrderRefused, SetPlanner, SetPools, Stop
from deploy.pools.wanted import PoolLimits
from deploy.pools.workers.record import WorkerState
from deploy.pools.workers.sightings import FLIP_TIMEOUT_S, UNREACHABLE_S
from engine.config import PlannerMode, WorkerConfig
from engine.control import GatewayReport, Intent, Member, Members, Pools, Version, VersionReport
from engine.layout import KVFormat
from engine.messages import LoadReport, Role, WorkerId

SAME = WorkerConfig()
APART = WorkerConfig(decode_kv_dtype=KVFormat.INT8)
IDLE = LoadReport(8, 0, 0, 0, 0, 0, 0, 0)
BUSY = LoadReport(8, 0, 0, 0, 0, 1, 1, 0)


ONE_EACH = Pools(1, 1)


class FakeProcess:
    """A worker that does what it is told at once; its answers take a while."""

    def __init__(self, role: Role, version: str) -> None:
        self.role = role
        self.version = version
        self.refuses: set[Role] = set()
        self.is_deaf = False
        self.is_stuck = False  # never idle
        self.is_mute = False  # does not do what it is told
        self.num_decoding = 0  # sequences


class World:
    """Launcher, workers and time, in which effects become events a little later."""

    def __init__(
        self, pools: Pools = ONE_EACH, max_workers: int = 8, config=SAME, gateways=("gateway",)
    ) -> None:
        self.now_s = 0.0
        limits = PoolLimits(max_workers, drain_timeout_s=20)
        intent = Intent((Version(worker=config, pools=pools),))
        self.machine = PoolMachine(intent, limits=limits, gateways=gateways)
        self.rng = random.Random(1)
        self.processes: dict[str, FakeProcess] = {}
        self.unheard: dict[str, FakeProcess] = {}  # they died, which nobody knows yet
        self.addresses: dict[str, str] = {}
        self.queue: list[tuple[float, int, object]] = []
        self.number = count()
        self.requests: Counter[str] = Counter()  # that gateways have, by version
        self.missing: dict[str, str] = {}  # what gateways lack for a version
        self.silent: set[str] = set()  # gateways
        self.hanging: set[str] = set()  # gateways with which no session begins
        self.fails: list[str] = []  # the next starts
        self.start_s = 0.5  # how long a start takes
        self.bad_versions: set[str] = set()  # that never start
        self.unreachable_versions: set[str] = set()  # that start, and with which no session begins
        self.fails_always: set[Role] = set()
        self.has_no_place: set[str] = set()  # of workers, until another node comes
        self.started: list[tuple[float, str]] = []
        self.stopped_gateways: list[tuple[float, str]] = []
        self.told: list[str] = []
        self.forbids_last = True

    # -------------------------------------------------------- time

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

    def report(self) -> None:
        """Gateways that serve say what they do with the members of now."""
        members = self.machine.members
        versions = {
            version.name: VersionReport(self.missing.get(version.name), number, "fp")
            for version in members.intent.versions
            for number in [self.requests[version.name]]
        }
        report = GatewayReport(None, members.version, 2, 0, 0, 0.0, versions=versions)
        for name, state in self.machine.gateways.items():
            if state is GatewayState.SERVING and name not in self.silent:
                self.feed(GatewaySeen(name, report))

    def settle(self, seconds: float = 400) -> None:
        end_s = self.now_s + seconds
        while not self.machine.is_settled:
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
                self.later(GatewayStarted(name), 0.5)
                if name not in self.hanging:
                    self.later(GatewayHeard(name), 0.6)
            case StopGateway(name):
                self.stopped_gateways.append((self.now_s, name))
                self.later(GatewayStopped(name))
            case Tell(step):
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
        self.processes[worker_id] = FakeProcess(role, wanted.version.name)
        self.addresses[worker_id] = address
        self.later(WorkerStarted(worker_id, start, address), self.start_s)
        kv_format = formats_of(wanted.version.worker)[role]
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
        """What is ordered leaves somebody who prefills, and who decodes, if somebody did, unless
        the version is over.
        """
        process = self.processes.get(worker_id)
        if process is None or process.is_deaf:
            return
        version = self.machine.intent.version(process.version)
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

    # -------------------------------------------------------- what is there

    def roles(self) -> dict[str, Role]:
        return {name: p.role for name, p in sorted(self.processes.items())}

    def states(self) -> dict[str, WorkerState]:
        return {name: w.state for name, w in self.machine.workers.items()}


def settled(*arguments, **options) -> World:
    world = World(*arguments, **options)
    world.feed(PoolTick())
    world.settle()
    world.told.clear()
    world.started.clear()
    return world


def wanting(prefill: int, decode: int) -> tuple[Version, ...]:
    return (Version(pools=Pools(prefill, decode)),)


def found(world: World) -> Found:
    members = [Member(WorkerId(name), address) for name, address in world.addresses.items()]
    return Found(tuple(members), ("gateway",))


P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def test_what_is_wanted_is_started_then_the_gateways_the_first_one_by_itself():
    world = World(Pools(2, 1), gateways=("gateway-0", "gateway-1"))
    world.feed(PoolTick())
    world.settle()
    assert world.roles() == {"prefill-0": P, "prefill-1": P, "decode-0": D}
    order = [line.split()[0] for line in world.told if "gateway" in line]
    assert order == ["gateway-0", "gateway-1"]
    assert {m.worker_id for m in world.machine.members.workers} == set(world.processes)


def test_gateways_are_started_although_some_workers_wait_for_nodes_that_come_later():
    world = World(Pools(1, 2))
    world.has_no_place = {"decode-0", "decode-1"}
    world.feed(PoolTick())
    world.run(20)
    assert not world.machine.has_begun  # nobody decodes
    world.has_no_place = {"decode-1"}
    world.run(40)
    assert world.machine.has_begun
    assert not world.machine.is_settled
    world.has_no_place.clear()
    world.settle()


def test_gateways_that_run_are_not_started_once_more_by_the_next_controller():
    names = ("gateway-0", "gateway-1")
    effects = World(gateways=names).machine.handle(Found((), names[1:]), 0.0)
    assert [e.name for e in effects if isinstance(e, StartGateway)] == ["gateway-0"]
    effects = World(gateways=names).machine.handle(Found((), names), 0.0)
    assert not [e for e in effects if isinstance(e, StartGateway)]


def test_growing_starts_and_shrinking_drains_before_it_stops():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    assert len(world.processes) == 4
    world.told.clear()
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert world.roles() == {"decode-0": D, "decode-1": D, "prefill-1": P}
    assert [line.split(",")[0] for line in world.told[1:]] == [
        "prefill-0 is drained of its work: too many prefill workers",
        "prefill-0 is drained",
        "prefill-0 was stopped",
    ]


def test_a_worker_too_much_is_flipped_into_the_pool_that_has_too_few():
    world = settled(Pools(3, 1))
    world.feed(SetPools(Pools(1, 3)))
    world.settle()
    assert world.started == []
    assert sorted(world.roles().values()) == [D, D, D, P]


def test_the_least_loaded_one_is_flipped():
    world = settled(Pools(2, 1))
    busy = LoadReport(8, 0, 0, 0, 0, 3, 1, 0, prompt_tokens=900)
    world.feed(LoadSeen(WorkerId("prefill-0"), world.addresses["prefill-0"], busy))
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert world.roles() == {"decode-0": D, "prefill-0": P, "prefill-1": D}


def test_workers_whose_kv_differs_are_not_flipped_but_replaced():
    world = settled(Pools(2, 1), config=APART)
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]


def test_a_pool_is_not_emptied_before_another_serves():
    world = settled(Pools(0, 0, 1), max_workers=2)
    world.feed(SetPools(Pools(1, 1, 0)))
    world.settle()
    assert sorted(world.roles().values()) == [D, P]
    assert len(world.started) == 1


def test_a_worker_that_is_just_being_started_is_waited_for_and_flipped():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 1)))
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]


def test_a_dead_worker_is_replaced_with_a_pause_that_grows():
    world = settled()
    world.fails_always = {D}
    world.die("decode-0")
    world.run(3600)
    times = [when for when, _ in world.started]
    assert len(times) <= 6 + 60
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[0] < 5
    assert min(gaps[7:]) >= 60
    assert any("for the 3. time in a row" in line for line in world.told)
    world.fails_always = set()
    world.settle()
    assert world.roles() == {"prefill-0": P, "decode-0": D}


def test_a_worker_that_cannot_be_reached_is_ended_by_force_and_replaced():
    world = settled()
    world.hang("decode-0")
    world.run(UNREACHABLE_S - 2)
    assert world.states()["decode-0"] is WorkerState.SERVING
    world.settle()
    assert len(world.started) == 1
    assert world.machine.counters["workers unreachable"] == 1


def test_a_worker_that_comes_back_in_time_stays():
    world = settled()
    world.hang("decode-0")
    world.run(5)
    world.processes["decode-0"].is_deaf = False
    address = world.addresses["decode-0"]
    world.feed(Connected(WorkerId("decode-0"), address, D, KVFormat.FP32))
    world.run(100)
    assert world.started == []
    assert world.machine.is_settled


def test_a_flip_that_a_worker_refuses_is_done_in_another_way():
    world = settled(Pools(2, 1))
    for process in world.processes.values():
        process.refuses = {D}
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]
    assert world.machine.counters["flips failed"] == 2


def test_a_flip_without_an_answer_is_given_up():
    world = settled(Pools(2, 1))
    world.processes["prefill-0"].is_mute = True
    world.feed(Flip(WorkerId("prefill-0"), D))
    world.run(FLIP_TIMEOUT_S + 2)
    assert world.machine.counters["flips failed"] == 1
    world.settle()
    assert sum(role is D for role in world.roles().values()) == 2


def test_a_flip_is_done_when_what_its_worker_decodes_has_moved():
    world = settled(Pools(1, 2))
    world.processes["decode-0"].num_decoding = 5
    world.feed(Flip(WorkerId("decode-0"), P))
    world.run(5)
    worker = world.machine.workers[WorkerId("decode-0")]
    assert worker.state is WorkerState.SERVING
    assert worker.prefills()
    assert worker.num_leaving_seqs == 5
    assert not world.machine.is_settled
    world.processes["decode-0"].num_decoding = 0
    world.settle()
    assert [line.split(",")[0] for line in world.told] == [
        "decode-0 is flipped from decode to prefill: ordered",
        "decode-0 is prefill now",
        "decode-0 decodes nothing any more",
    ]


def test_a_flip_back_leaves_nothing_to_be_moved():
    world = settled(Pools(1, 2))
    world.processes["decode-0"].num_decoding = 5
    world.feed(Flip(WorkerId("decode-0"), P))
    world.run(5)
    world.feed(Flip(WorkerId("decode-0"), D))
    world.settle()
    assert world.machine.workers[WorkerId("decode-0")].num_leaving_seqs == 0


def test_who_was_cut_off_while_it_was_flipped_has_time_to_answer_when_it_is_back():
    world = settled(Pools(2, 1))
    world.processes["prefill-0"].is_mute = True
    world.feed(Flip(WorkerId("prefill-0"), D))
    world.hang("prefill-0")
    world.run(FLIP_TIMEOUT_S + 5)
    world.processes["prefill-0"].is_mute = world.processes["prefill-0"].is_deaf = False
    world.feed(Connected(WorkerId("prefill-0"), world.addresses["prefill-0"], P, SAME.kv_dtype))
    world.feed(PoolTick())
    world.settle()
    assert world.roles()["prefill-0"] is D
    assert not world.machine.counters["flips failed"]


def test_who_serves_and_comes_back_as_something_else_is_told_again_and_only_so_often():
    world = settled(Pools(1, 2))
    process, address = world.processes["decode-0"], world.addresses["decode-0"]
    process.is_mute, process.role = True, P
    world.feed(Disconnected(WorkerId("decode-0"), address, "cut off"))
    world.feed(Connected(WorkerId("decode-0"), address, P, SAME.kv_dtype))
    assert not world.machine.is_settled
    assert world.machine.counters["flips"] == 1
    world.run(FLIP_TIMEOUT_S + 2)
    assert world.machine.counters["flips failed"] == 1
    process.is_mute = False
    world.settle()
    assert sorted(world.roles().values()) == [D, D, P]


def test_a_drain_has_a_deadline_after_which_the_worker_is_stopped_all_the_same():
    world = settled(Pools(2, 1))
    for process in world.processes.values():
        process.is_stuck = True
    world.feed(SetPools(Pools(1, 1)))
    world.run(10)
    assert len(world.processes) == 3
    world.run(20)
    assert len(world.processes) == 2
    assert world.machine.counters["drains timed out"] == 1
    assert any("is stopped all the same" in line for line in world.told)


def test_a_drained_worker_stays_until_it_is_flipped_back():
    world = settled(Pools(2, 1))
    world.feed(Drain(WorkerId("prefill-0")))
    world.settle()
    world.run(100)
    assert world.states()["prefill-0"] is WorkerState.DRAINED
    assert world.machine.intent == Intent(wanting(1, 1), drained=(WorkerId("prefill-0"),))
    world.feed(Flip(WorkerId("prefill-0"), D))
    world.settle()
    assert world.machine.intent == Intent(wanting(1, 2))
    assert world.started == []


def test_a_worker_that_is_to_be_stopped_is_not_replaced():
    world = settled(Pools(2, 1))
    world.feed(Stop(WorkerId("prefill-1")))
    world.settle()
    world.run(100)
    assert list(world.processes) == ["prefill-0", "decode-0"]
    assert world.machine.intent.pools == Pools(1, 1)


def test_a_worker_may_be_stopped_while_it_starts_and_while_it_waits_to():
    world = settled()
    world.feed(SetPools(Pools(2, 1)))
    world.feed(Stop(WorkerId("prefill-1")))
    world.settle()
    world.fails_always = {D}
    world.feed(SetPools(Pools(1, 2)))
    world.run(2)
    while world.states()["decode-1"] is not WorkerState.WAITING:
        world.run(1)
    world.feed(Stop(WorkerId("decode-1")))
    world.settle()
    assert sorted(world.processes) == ["decode-0", "prefill-0"]


@pytest.mark.parametrize(
    ("order", "reason", "status"),
    [
        (SetPools(Pools(0, 1)), "need a prefill and a decode worker", 400),
        (SetPools(Pools(-1, 1, 1)), "fewer than 0", 400),
        (SetPools(Pools(4, 3)), "7 workers are more than the 6 there can be", 409),
        (Flip(WorkerId("prefill-0"), D), "need a prefill and a decode|last worker that pre", 409),
        (Flip(WorkerId("decode-0"), D), "decode already", 409),
        (Flip(WorkerId("decode-0"), Role.DRAINED), "it is drained", 400),
        (Flip(WorkerId("decode-7"), D), "no worker is called decode-7; there are: dec", 404),
        (Drain(WorkerId("prefill-0")), "the last worker that prefills", 409),
        (Stop(WorkerId("prefill-0")), "the last worker that prefills", 409),
        (Drain(WorkerId("x")), "no worker is called x", 404),
        (Stop(WorkerId("x")), "no worker is called x", 404),
    ],
)
def test_an_impossible_order_is_refused_with_the_reason(order, reason, status):
    world = settled(Pools(1, 2), max_workers=6)
    before = world.machine.members
    with pytest.raises(OrderRefused, match=reason) as caught:
        world.feed(order)
    assert caught.value.status == status
    assert world.machine.members == before
    assert world.machine.is_settled


def test_a_flip_between_formats_is_refused_and_so_is_too_much_beside_a_drained_worker():
    world = settled(Pools(2, 2), max_workers=4, config=APART)
    with pytest.raises(OrderRefused, match="holds KV as fp32, decode workers as int8"):
        world.feed(Flip(WorkerId("prefill-0"), D))
    world.feed(Drain(WorkerId("prefill-0")))
    with pytest.raises(OrderRefused, match="4 workers beside prefill-0, drained, are more than"):
        world.feed(SetPools(Pools(2, 2)))


def test_after_a_node_is_lost_pools_may_change_so_long_as_they_do_not_grow():
    world = settled(Pools(2, 2), max_workers=5)
    world.feed(Drain(WorkerId("decode-0")))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    world.feed(RoomSeen(3, "one node is gone"))
    world.feed(SetPools(Pools(3, 1)))
    world.settle()
    world.feed(Flip(WorkerId("decode-0"), D))  # it was drained: all the same number of workers
    world.settle()
    assert world.machine.intent.pools == Pools(3, 2)
    with pytest.raises(OrderRefused, match=r"6 workers are more than the 3 .*: one node is gone"):
        world.feed(SetPools(Pools(3, 3)))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    assert sorted(world.roles().values()) == [D, D, P, P]


def test_a_gateway_that_ends_is_started_again():
    world = settled()
    world.feed(Died("gateway", "ended with status -9"))
    assert world.told == ["gateway ended with status -9: it is started again in 1 s"]
    world.settle()
    assert world.told[-1] == "gateway was started again"
    world.feed(GatewayFailed("gateway", "no port"))
    assert "did not start: no port" in world.told[-1]


def test_another_controller_goes_on_where_the_first_one_was():
    world = settled(Pools(2, 2))
    world.feed(Drain(WorkerId("prefill-0")))
    world.feed(SetPlanner(PlannerMode.DRY_RUN))
    world.settle()
    before = world.machine.members
    world.machine = PoolMachine(
        before.intent, limits=world.machine.limits, gateways=["gateway"], version=before.version
    )
    world.feed(found(world))
    world.run(3)
    assert world.started == []  # nothing is decided before it is known who is what
    for name, process in world.processes.items():
        address = world.addresses[name]
        world.feed(Connected(WorkerId(name), address, process.role, KVFormat.FP32))
    world.settle()
    assert world.started == []
    assert world.machine.members.workers == before.workers
    assert world.machine.members.version > before.version
    assert world.machine.intent == before.intent


def test_a_drained_worker_that_nobody_wants_kept_goes_when_another_controller_finds_it():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 1)))
    world.settle()
    world.processes["prefill-1"].role = Role.DRAINED
    world.machine = PoolMachine(
        Intent(wanting(1, 1)), limits=world.machine.limits, gateways=["gateway"], version=9
    )
    world.feed(found(world))
    for name, process in list(world.processes.items()):
        address = world.addresses[name]
        world.feed(Connected(WorkerId(name), address, process.role, KVFormat.FP32))
    world.settle()
    assert world.roles() == {"decode-0": D, "prefill-0": P}


def test_a_gateway_that_nobody_reaches_is_stopped_and_started_again():
    world = settled(Pools(1, 1))
    begun_s = world.now_s
    world.feed(GatewayUnheard("gateway", "silent for 5.1 s"))
    world.run(GATEWAY_UNREACHABLE_S - 1)
    assert not world.stopped_gateways
    world.run(2)
    [(stopped_s, name)] = world.stopped_gateways
    assert name == "gateway"
    assert stopped_s - begun_s <= GATEWAY_UNREACHABLE_S + 1
    world.settle(30)
    assert world.machine.gateways["gateway"] is GatewayState.SERVING
    assert world.machine.counters["gateways unreachable"] == 1
    world.run(30)
    assert len(world.stopped_gateways) == 1


def test_a_gateway_that_is_heard_again_in_time_stays():
    world = settled(Pools(1, 1))
    world.feed(GatewayUnheard("gateway", "silent for 5.1 s"))
    world.run(GATEWAY_UNREACHABLE_S - 2)
    world.feed(GatewayHeard("gateway"))
    world.run(60)
    assert not world.stopped_gateways


def test_a_gateway_that_hangs_before_its_first_session_is_stopped_and_started_again():
    world = settled(Pools(1, 1))
    world.hanging.add("gateway")
    world.feed(Died("gateway", "killed"))
    world.run(GATEWAY_UNREACHABLE_S + 3)
    assert len(world.stopped_gateways) == 1
    world.hanging.clear()
    world.run(60)
    assert world.machine.is_settled
    assert len(world.stopped_gateways) == 1


def test_the_end_of_a_gateway_that_is_stopped_is_told_once():
    machine = settled(Pools(1, 1)).machine
    machine._gateways.states["gateway"] = GatewayState.STOPPING
    assert not machine.handle(Died("gateway", "killed"), 1e4)
    assert machine.gateways["gateway"] is GatewayState.STOPPING
    machine.handle(GatewayStopped("gateway"), 1e4)
    assert machine.gateways["gateway"] is GatewayState.WAITING


def test_another_controller_starts_gateways_although_a_worker_is_missing():
    world = settled(Pools(2, 1))
    world.die("prefill-1")
    del world.addresses["prefill-1"]
    world.queue.clear()
    world.fails_always.add(P)
    world.machine = PoolMachine(
        Intent(wanting(2, 1)), limits=world.machine.limits, gateways=["gateway"]
    )
    world.feed(Found(found(world).workers))
    world.run(3)
    assert world.machine.gateways["gateway"] is GatewayState.WAITING
    for name, process in list(world.processes.items()):
        address = world.addresses[name]
        world.feed(Connected(WorkerId(name), address, process.role, KVFormat.FP32))
    world.run(3)
    assert world.machine.gateways["gateway"] is GatewayState.SERVING
    assert list(world.roles()) == ["decode-0", "prefill-0"]


def test_what_was_found_and_never_reached_is_stopped_and_replaced():
    world = settled()
    world.machine = PoolMachine(
        Intent(wanting(1, 1)), limits=world.machine.limits, gateways=["gateway"]
    )
    for process in world.processes.values():
        process.is_deaf = True
    world.feed(found(world))
    world.run(UNREACHABLE_S + 5)
    world.settle()
    assert world.roles() == {"decode-0": D, "prefill-0": P}
    assert len(world.started) == 2


def test_members_that_a_gateway_knows_from_another_controller_are_overtaken():
    world = settled()
    before = world.machine.members
    others = Intent((Version("v2"),))
    world.feed(Overtaken(Members(before.version - 1, (), others)))
    assert world.machine.members == before
    world.feed(Overtaken(Members(before.version + 7, (), others)))
    assert world.machine.members == msgspec.structs.replace(before, version=before.version + 8)


def taken_over(world: World) -> Members:
    """Another controller finds workers of a version that it does not know, and a gateway that is
    silent. What that gateway was told.
    """
    world.machine.wanted.intent = Intent((Version("v2", pools=Pools(1, 1)),))
    for worker in world.machine.workers.values():
        worker.version = "v2"
    for process in world.processes.values():
        process.version = "v2"
    world.feed(PoolTick())
    known = world.machine.members
    world.machine = PoolMachine(
        Intent(wanting(1, 1)), limits=world.machine.limits, gateways=["gateway"], is_guess=True
    )
    members = tuple(
        Member(WorkerId(name), address, "v2") for name, address in world.addresses.items()
    )
    world.feed(Found(members, ("gateway",)))
    for name, process in world.processes.items():
        address = world.addresses[name]
        world.feed(Connected(WorkerId(name), address, process.role, KVFormat.FP32))
    return known


def versions_of(world: World) -> Counter[str]:
    return Counter(worker.version for worker in world.machine.workers.values())


def test_while_no_gateway_was_heard_workers_of_an_unknown_version_stay():
    world = settled()
    taken_over(world)
    world.run(30)
    assert versions_of(world)["v2"] == 2
    assert all(process.role is not Role.DRAINED for process in world.processes.values())
    world.feed(GatewayHeard("gateway"))
    world.settle()
    assert versions_of(world) == {"v1": 2}


def test_what_a_gateway_was_told_before_counts_for_one_who_knew_nothing():
    world = settled()
    known = taken_over(world)
    world.run(30)
    world.feed(Overtaken(known))
    assert world.machine.members.intent == known.intent
    assert world.machine.members.version > known.version
    world.feed(GatewayHeard("gateway"))
    world.settle()
    assert versions_of(world) == {"v2": 2}
    world.feed(Overtaken(Members(99, (), Intent(wanting(1, 1)))))
    assert world.machine.members.intent == known.intent, "from now on it knows"


def test_an_order_to_one_who_knew_nothing_counts_for_more_than_what_a_gateway_was_told():
    world = settled()
    known = taken_over(world)
    with pytest.raises(OrderRefused):
        world.feed(SetPools(Pools(1, 90)))
    assert world.machine.is_guess
    world.feed(SetPools(Pools(1, 2)))
    world.feed(Overtaken(known))
    assert world.machine.intent.pools == Pools(1, 2)
    assert world.machine.members.version > known.version


def test_news_of_an_earlier_start_of_the_same_name_count_for_nothing():
    world = settled()
    old = world.addresses["decode-0"]
    world.die("decode-0")
    world.run(2)
    world.settle()
    before = repr(world.machine.workers)
    world.feed(Disconnected(WorkerId("decode-0"), old, "late"))
    world.feed(RoleSeen(WorkerId("decode-0"), old, P))
    world.feed(WorkerStarted(WorkerId("decode-0"), 1, old))
    world.feed(WorkerStartFailed(WorkerId("decode-0"), 1, "late"))
    world.feed(WorkerStopped(WorkerId("decode-0")))
    assert repr(world.machine.workers) == before


small = st.integers(0, 3)
wanted = st.builds(Pools, small, small, small).filter(
    lambda p: p.total <= 6 and (p.mixed or (p.prefill and p.decode))
)
names = st.sampled_from([f"{role}-{i}" for role in (P, D, M) for i in range(3)]).map(WorkerId)
actions = st.one_of(
    st.tuples(st.just("order"), st.builds(SetPools, wanted)),
    st.tuples(st.just("order"), st.builds(Flip, names, st.sampled_from((P, D, M)))),
    st.tuples(st.just("order"), st.builds(Drain, names)),
    st.tuples(st.just("order"), st.builds(Stop, names)),
    st.tuples(st.just("die"), names),
    st.tuples(st.just("hang"), names),
    st.tuples(st.just("stick"), names),
    st.tuples(st.just("refuse"), names),
    st.tuples(st.just("fail"), st.integers(1, 3)),
    st.tuples(st.just("run"), st.integers(1, 40)),
)


@settings(max_examples=60, deadline=None)
@given(
    first=wanted,
    script=st.lists(actions, max_size=12),
    config=st.sampled_from([SAME, APART]),
    seed=st.integers(0, 99),
)
def test_whatever_happens_the_pools_come_to_be_what_is_wanted(first, script, config, seed):
    world = World(first, max_workers=6, config=config)
    world.rng = random.Random(seed)
    world.feed(PoolTick())
    for what, argument in script:
        process = world.processes.get(argument) if isinstance(argument, str) else None
        connected = process is not None and world.machine.workers[argument].is_connected
        if what == "order":
            try:
                world.feed(argument)
            except OrderRefused:
                world.machine.validate()
        elif what == "run":
            world.run(argument)
        elif what == "fail":
            world.fails += ["random"] * argument
        elif what == "die" and connected:
            world.die(argument)
        elif what == "hang" and connected:
            world.hang(argument)
        elif what == "stick" and connected:
            process.is_stuck = True
        elif what == "refuse" and connected:
            process.refuses = {P, D, M} - {process.role}
    for process in world.processes.values():
        process.is_stuck = False
    world.run(2)
    world.settle(800)
    counts = [sum(p.role is role for p in world.processes.values()) for role in (P, D, M)]
    pools = world.machine.intent.pools
    assert counts == [pools.prefill, pools.decode, pools.mixed]
    world.run(100)
    assert world.machine.is_settled
