"""The machine of the pools: it converges, and never takes the last worker of a role."""

import random
from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.pools.effects import (
    StartGateway,
)
from deploy.pools.events import (
    Died,
    Disconnected,
    Found,
    GatewayFailed,
    GatewayHeard,
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
from deploy.pools.gateways import GATEWAY_UNREACHABLE_S, GatewayState
from deploy.pools.orders import Drain, Flip, OrderRefused, SetPlanner, SetPools, Stop
from deploy.pools.workers.record import WorkerState
from deploy.pools.workers.sightings import FLIP_TIMEOUT_S, UNREACHABLE_S
from engine.config import PlannerMode
from engine.control import Intent, Members, Pools, Version
from engine.messages import LoadReport, Role, WorkerId
from tests.kits.pools import APART, SAME, PoolWorld, settled


def wanting(prefill: int, decode: int) -> tuple[Version, ...]:
    return (Version(pools=Pools(prefill, decode)),)


P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def test_workers_start_first_then_one_gateway_then_the_others():
    world = PoolWorld(Pools(2, 1), gateways=("gateway-0", "gateway-1"))
    world.feed(PoolTick())
    world.settle()
    assert world.roles() == {"prefill-0": P, "prefill-1": P, "decode-0": D}
    order = [line.split()[0] for line in world.told if "gateway" in line]
    assert order == ["gateway-0", "gateway-1"]
    assert {m.worker_id for m in world.machine.members.workers} == set(world.processes)


def test_gateways_start_although_some_workers_wait_for_nodes():
    world = PoolWorld(Pools(1, 2))
    world.has_no_place = {"decode-0", "decode-1"}
    world.feed(PoolTick())
    world.run(20)
    assert not world.machine.has_begun  # no worker decodes
    world.has_no_place = {"decode-1"}
    world.run(40)
    assert world.machine.has_begun
    assert not world.machine.is_settled
    world.has_no_place.clear()
    world.settle()


def test_next_controller_does_not_start_running_gateways_again():
    names = ("gateway-0", "gateway-1")
    effects = PoolWorld(gateways=names).machine.handle(Found((), names[1:]), 0.0)
    assert [e.name for e in effects if isinstance(e, StartGateway)] == ["gateway-0"]
    effects = PoolWorld(gateways=names).machine.handle(Found((), names), 0.0)
    assert not [e for e in effects if isinstance(e, StartGateway)]


def test_growing_starts_workers_and_shrinking_drains_before_stopping():
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


def test_surplus_worker_is_flipped_into_the_pool_that_lacks_one():
    world = settled(Pools(3, 1))
    world.feed(SetPools(Pools(1, 3)))
    world.settle()
    assert world.started == []
    assert sorted(world.roles().values()) == [D, D, D, P]


def test_least_loaded_worker_is_flipped():
    world = settled(Pools(2, 1))
    busy = LoadReport(8, 0, 0, 0, 0, 3, 1, 0, prompt_tokens=900)
    world.feed(LoadSeen(WorkerId("prefill-0"), world.addresses["prefill-0"], busy))
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert world.roles() == {"decode-0": D, "prefill-0": P, "prefill-1": D}


def test_workers_of_another_kv_format_are_replaced_not_flipped():
    world = settled(Pools(2, 1), config=APART)
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]


def test_pool_is_not_emptied_before_another_serves():
    world = settled(Pools(0, 0, 1), max_workers=2)
    world.feed(SetPools(Pools(1, 1, 0)))
    world.settle()
    assert sorted(world.roles().values()) == [D, P]
    assert len(world.started) == 1


def test_starting_worker_is_awaited_and_flipped():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 1)))
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]


def test_dead_worker_is_restarted_after_growing_pauses():
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


def test_unreachable_worker_is_stopped_by_force_and_replaced():
    world = settled()
    world.hang("decode-0")
    world.run(UNREACHABLE_S - 2)
    assert world.states()["decode-0"] is WorkerState.SERVING
    world.settle()
    assert len(world.started) == 1
    assert world.machine.counters["workers unreachable"] == 1


def test_worker_that_reconnects_in_time_stays():
    world = settled()
    world.hang("decode-0")
    world.run(5)
    world.processes["decode-0"].is_deaf = False
    world.connect("decode-0")
    world.run(100)
    assert world.started == []
    assert world.machine.is_settled


def test_refused_flip_is_replaced_by_another_move():
    world = settled(Pools(2, 1))
    for process in world.processes.values():
        process.refuses = {D}
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]
    assert world.machine.counters["flips failed"] == 2


def test_flip_without_an_answer_is_given_up():
    world = settled(Pools(2, 1))
    world.processes["prefill-0"].is_mute = True
    world.feed(Flip(WorkerId("prefill-0"), D))
    world.run(FLIP_TIMEOUT_S + 2)
    assert world.machine.counters["flips failed"] == 1
    world.settle()
    assert sum(role is D for role in world.roles().values()) == 2


def test_flip_settles_once_decoding_sequences_have_moved():
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
        "decode-0 has stopped decoding",
    ]


def test_flip_back_cancels_the_moves():
    world = settled(Pools(1, 2))
    world.processes["decode-0"].num_decoding = 5
    world.feed(Flip(WorkerId("decode-0"), P))
    world.run(5)
    world.feed(Flip(WorkerId("decode-0"), D))
    world.settle()
    assert world.machine.workers[WorkerId("decode-0")].num_leaving_seqs == 0


def test_flip_deadline_restarts_after_a_reconnect():
    world = settled(Pools(2, 1))
    world.processes["prefill-0"].is_mute = True
    world.feed(Flip(WorkerId("prefill-0"), D))
    world.hang("prefill-0")
    world.run(FLIP_TIMEOUT_S + 5)
    world.processes["prefill-0"].is_mute = world.processes["prefill-0"].is_deaf = False
    world.connect("prefill-0")
    world.feed(PoolTick())
    world.settle()
    assert world.roles()["prefill-0"] is D
    assert not world.machine.counters["flips failed"]


def test_worker_that_returns_in_another_role_is_told_again_a_limited_number_of_times():
    world = settled(Pools(1, 2))
    process, address = world.processes["decode-0"], world.addresses["decode-0"]
    process.is_mute, process.role = True, P
    world.feed(Disconnected(WorkerId("decode-0"), address, "cut off"))
    world.connect("decode-0")
    assert not world.machine.is_settled
    assert world.machine.counters["flips"] == 1
    world.run(FLIP_TIMEOUT_S + 2)
    assert world.machine.counters["flips failed"] == 1
    process.is_mute = False
    world.settle()
    assert sorted(world.roles().values()) == [D, D, P]


def test_worker_is_stopped_after_the_drain_deadline():
    world = settled(Pools(2, 1))
    for process in world.processes.values():
        process.is_stuck = True
    world.feed(SetPools(Pools(1, 1)))
    world.run(10)
    assert len(world.processes) == 3
    world.run(20)
    assert len(world.processes) == 2
    assert world.machine.counters["drains timed out"] == 1
    assert any("is stopped anyway" in line for line in world.told)


def test_drained_worker_stays_until_flipped_back():
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


def test_stopped_worker_is_not_replaced():
    world = settled(Pools(2, 1))
    world.feed(Stop(WorkerId("prefill-1")))
    world.settle()
    world.run(100)
    assert list(world.processes) == ["prefill-0", "decode-0"]
    assert world.machine.intent.pools == Pools(1, 1)


def test_worker_can_be_stopped_while_starting_or_waiting():
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
def test_impossible_order_is_refused_with_the_reason(order, reason, status):
    world = settled(Pools(1, 2), max_workers=6)
    before = world.machine.members
    with pytest.raises(OrderRefused, match=reason) as caught:
        world.feed(order)
    assert caught.value.status == status
    assert world.machine.members == before
    assert world.machine.is_settled


def test_flip_between_formats_and_order_above_the_room_are_refused():
    world = settled(Pools(2, 2), max_workers=4, config=APART)
    with pytest.raises(OrderRefused, match="holds KV as fp32, decode workers as int8"):
        world.feed(Flip(WorkerId("prefill-0"), D))
    world.feed(Drain(WorkerId("prefill-0")))
    with pytest.raises(OrderRefused, match="4 workers beside prefill-0, drained, are more than"):
        world.feed(SetPools(Pools(2, 2)))


def test_pools_above_the_room_may_change_but_not_grow():
    world = settled(Pools(2, 2), max_workers=5)
    world.feed(Drain(WorkerId("decode-0")))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    world.feed(RoomSeen(3, "one node is gone"))
    world.feed(SetPools(Pools(3, 1)))
    world.settle()
    world.feed(Flip(WorkerId("decode-0"), D))  # it was drained: the number of workers stays
    world.settle()
    assert world.machine.intent.pools == Pools(3, 2)
    with pytest.raises(OrderRefused, match=r"6 workers are more than the 3 .*: one node is gone"):
        world.feed(SetPools(Pools(3, 3)))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    assert sorted(world.roles().values()) == [D, D, P, P]


def test_dead_gateway_is_started_again():
    world = settled()
    world.feed(Died("gateway", "ended with status -9"))
    assert world.told == ["gateway ended with status -9: it is started again in 1 s"]
    world.settle()
    assert world.told[-1] == "gateway was started again"
    world.feed(GatewayFailed("gateway", "no port"))
    assert "did not start: no port" in world.told[-1]


def test_next_controller_continues_with_the_same_intent():
    world = settled(Pools(2, 2))
    world.feed(Drain(WorkerId("prefill-0")))
    world.feed(SetPlanner(PlannerMode.DRY_RUN))
    world.settle()
    before = world.machine.members
    world.replace_controller(before.intent, version=before.version)
    world.run(3)
    assert world.started == []  # no decision before all roles are known
    world.connect()
    world.settle()
    assert world.started == []
    assert world.machine.members.workers == before.workers
    assert world.machine.members.version > before.version
    assert world.machine.intent == before.intent


def test_next_controller_stops_drained_workers_that_are_not_kept():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 1)))
    world.settle()
    world.processes["prefill-1"].role = Role.DRAINED
    world.replace_controller(Intent(wanting(1, 1)), version=9)
    world.connect()
    world.settle()
    assert world.roles() == {"decode-0": D, "prefill-0": P}


def test_unreachable_gateway_is_stopped_and_started_again():
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


def test_gateway_that_reconnects_in_time_stays():
    world = settled(Pools(1, 1))
    world.feed(GatewayUnheard("gateway", "silent for 5.1 s"))
    world.run(GATEWAY_UNREACHABLE_S - 2)
    world.feed(GatewayHeard("gateway"))
    world.run(60)
    assert not world.stopped_gateways


def test_gateway_that_never_gets_a_session_is_restarted():
    world = settled(Pools(1, 1))
    world.hanging.add("gateway")
    world.feed(Died("gateway", "killed"))
    world.run(GATEWAY_UNREACHABLE_S + 3)
    assert len(world.stopped_gateways) == 1
    world.hanging.clear()
    world.run(60)
    assert world.machine.is_settled
    assert len(world.stopped_gateways) == 1


def test_end_of_a_stopped_gateway_is_reported_once():
    machine = settled(Pools(1, 1)).machine
    machine._gateways.states["gateway"] = GatewayState.STOPPING
    assert not machine.handle(Died("gateway", "killed"), 1e4)
    assert machine.gateways["gateway"] is GatewayState.STOPPING
    machine.handle(GatewayStopped("gateway"), 1e4)
    assert machine.gateways["gateway"] is GatewayState.WAITING


def test_next_controller_starts_gateways_although_a_worker_is_missing():
    world = settled(Pools(2, 1))
    world.die("prefill-1")
    world.queue.clear()
    world.fails_always.add(P)
    world.replace_controller(Intent(wanting(2, 1)), gateways=())
    world.run(3)
    assert world.machine.gateways["gateway"] is GatewayState.WAITING
    world.connect()
    world.run(3)
    assert world.machine.gateways["gateway"] is GatewayState.SERVING
    assert list(world.roles()) == ["decode-0", "prefill-0"]


def test_found_but_unreachable_workers_are_replaced():
    world = settled()
    for process in world.processes.values():
        process.is_deaf = True
    world.replace_controller(Intent(wanting(1, 1)))
    world.run(UNREACHABLE_S + 5)
    world.settle()
    assert world.roles() == {"decode-0": D, "prefill-0": P}
    assert len(world.started) == 2


def test_members_of_an_earlier_controller_get_a_higher_version():
    world = settled()
    before = world.machine.members
    others = Intent((Version("v2"),))
    world.feed(Overtaken(Members(before.version - 1, (), others)))
    assert world.machine.members == before
    world.feed(Overtaken(Members(before.version + 7, (), others)))
    assert world.machine.members == msgspec.structs.replace(before, version=before.version + 8)


def taken_over(world: PoolWorld) -> Members:
    """Starts another controller, which finds workers of an unknown version and a silent gateway.

    Returns the members that the gateway was told before.
    """
    world.machine.wanted.intent = Intent((Version("v2", pools=Pools(1, 1)),))
    for worker in world.machine.workers.values():
        worker.version = "v2"
    for process in world.processes.values():
        process.version = "v2"
    world.feed(PoolTick())
    known = world.machine.members
    world.replace_controller(Intent(wanting(1, 1)), is_guess=True)
    world.connect()
    return known


def versions_of(world: PoolWorld) -> Counter[str]:
    return Counter(worker.version for worker in world.machine.workers.values())


def test_workers_of_unknown_versions_stay_until_a_gateway_is_heard():
    world = settled()
    taken_over(world)
    world.run(30)
    assert versions_of(world)["v2"] == 2
    assert all(process.role is not Role.DRAINED for process in world.processes.values())
    world.feed(GatewayHeard("gateway"))
    world.settle()
    assert versions_of(world) == {"v1": 2}


def test_guessed_intent_is_replaced_by_a_gateways():
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


def test_order_outranks_a_gateways_earlier_intent():
    world = settled()
    known = taken_over(world)
    with pytest.raises(OrderRefused):
        world.feed(SetPools(Pools(1, 90)))
    assert world.machine.is_guess
    world.feed(SetPools(Pools(1, 2)))
    world.feed(Overtaken(known))
    assert world.machine.intent.pools == Pools(1, 2)
    assert world.machine.members.version > known.version


def test_events_of_an_earlier_start_are_ignored():
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
def test_pools_converge_to_what_is_wanted_after_any_events(first, script, config, seed):
    world = PoolWorld(first, max_workers=6, config=config)
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
