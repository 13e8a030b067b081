"""The pool machine: it converges, and never stops the last worker of a role."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.pools.events import Found, GatewayHeard, Overtaken, PartsSeen, PoolTick, StartGateway
from deploy.pools.gateways import GatewayState
from deploy.pools.orders import Drain, Flip, OrderRefused, SetPlanner, SetPools, Stop
from engine.config import PlannerMode
from engine.control import Intent, Members, Pools, Version
from engine.messages import Role, WorkerId
from tests.kits.pools import APART, SAME, PoolWorld, intent_of, settled

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def test_workers_start_first_then_one_gateway_then_the_others():
    world = PoolWorld(Pools(2, 1), gateways=("gateway-0", "gateway-1"))
    world.feed(PoolTick())
    world.settle()
    assert world.roles() == {"worker-0": P, "worker-1": P, "worker-2": D}
    order = [line.split()[0] for line in world.told if "gateway" in line]
    assert order == ["gateway-0", "gateway-1"]
    assert {m.worker_id for m in world.machine.members.workers} == set(world.processes)


def test_a_name_says_no_role_and_the_smallest_free_number_is_taken_again():
    world = settled(Pools(2, 1))
    world.feed(Flip(WorkerId("worker-0"), D))
    world.settle()
    world.feed(Stop(WorkerId("worker-1" if world.roles()["worker-1"] is D else "worker-2")))
    world.settle()
    assert world.roles() == {"worker-0": D, "worker-1": P}
    world.feed(SetPools(Pools(2, 1)))
    world.settle()
    assert world.roles() == {"worker-0": D, "worker-1": P, "worker-2": P}


def test_workers_are_listed_by_role_then_by_number():
    world = settled(Pools(1, 11), max_workers=12)
    world.feed(Flip(WorkerId("worker-4"), M))
    world.settle()
    numbers = (1, 2, 3, 5, 6, 7, 8, 9, 10, 11)
    decoding = [f"worker-{number} (decode)" for number in numbers]
    with pytest.raises(OrderRefused) as refused:
        world.feed(Drain(WorkerId("worker-99")))
    listed = str(refused.value).partition("there are: ")[2].split(", ")
    assert listed == ["worker-0 (prefill)", *decoding, "worker-4 (mixed)"]


def test_gateways_start_although_some_workers_wait_for_nodes():
    world = PoolWorld(Pools(1, 2))
    world.has_no_place = {"worker-1", "worker-2"}
    world.feed(PoolTick())
    world.run(20)
    assert not world.machine.has_begun  # because no worker decodes
    world.has_no_place = {"worker-2"}
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


def test_next_controller_continues_with_the_same_intent():
    world = settled(Pools(2, 2))
    world.feed(Drain(WorkerId("worker-0")))
    world.feed(SetPlanner(PlannerMode.DRY_RUN))
    world.settle()
    before = world.machine.members
    world.replace_controller(before.intent, version=before.version)
    world.run(3)
    assert world.started == []  # the machine decides nothing until it knows all roles
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
    world.processes["worker-2"].role = Role.DRAINED
    world.replace_controller(intent_of(Pools(1, 1)), version=9)
    world.connect()
    world.settle()
    assert world.roles() == {"worker-0": P, "worker-1": D}


def test_next_controller_starts_gateways_although_a_worker_is_missing():
    world = settled(Pools(2, 1))
    world.die("worker-1")
    world.queue.clear()
    world.fails_always.add(P)
    world.replace_controller(intent_of(Pools(2, 1)), gateways=())
    world.run(3)
    assert world.machine.gateways["gateway"] is GatewayState.WAITING
    world.connect()
    world.run(3)
    assert world.machine.gateways["gateway"] is GatewayState.SERVING
    assert list(world.roles()) == ["worker-0", "worker-2"]


def test_members_of_an_earlier_controller_get_a_higher_version():
    world = settled()
    before = world.machine.members
    others = Intent((Version("v2"),))
    world.feed(Overtaken(Members(before.version - 1, (), others)))
    assert world.machine.members == before
    world.feed(Overtaken(Members(before.version + 7, (), others)))
    assert world.machine.members == msgspec.structs.replace(before, version=before.version + 8)


def taken_over(world: PoolWorld) -> Members:
    """Starts a new controller, which finds workers of an unknown version and a silent gateway.

    Returns the members that the gateway had received before.
    """
    world.machine.state.intent = Intent((Version("v2", pools=Pools(1, 1)),))
    for worker in world.machine.workers.values():
        worker.version = "v2"
    for process in world.processes.values():
        process.version = "v2"
    world.feed(PoolTick())
    known = world.machine.members
    world.replace_controller(intent_of(Pools(1, 1)), is_guess=True)
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
    world.feed(Overtaken(Members(99, (), intent_of(Pools(1, 1)))))
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


small = st.integers(0, 3)
wanted = st.builds(Pools, small, small, small).filter(
    lambda p: p.total <= 6 and (p.mixed or (p.prefill and p.decode))
)
names = st.sampled_from([f"worker-{i}" for i in range(8)]).map(WorkerId)
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
    num_spares=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_pools_converge_to_what_is_wanted_after_any_events(first, script, config, num_spares, seed):
    world = PoolWorld(first, max_workers=6, config=config, num_spares=num_spares)
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
    world.run(40)  # longer than every deadline
    assert world.machine.is_settled


def test_dead_part_of_ray_is_reported_until_it_runs_again():
    world = settled()
    world.feed(PartsSeen({"gcs": True, "raylet": True}))
    assert world.machine.is_settled
    for _ in range(2):
        world.feed(PartsSeen({"gcs": False, "raylet": True}))
        [trouble] = world.machine.troubles()
        assert trouble.startswith("gcs of Ray is dead")
        assert not world.machine.is_settled
    world.feed(PartsSeen({"gcs": True, "raylet": True}))
    assert world.machine.is_settled
    assert not world.machine.troubles()
    assert [line.split(":")[0] for line in world.told] == ["gcs is dead", "gcs runs again"]
