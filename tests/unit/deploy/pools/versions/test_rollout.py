"""Model versions start, take over and are removed; each request keeps its workers until it ends."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.pools.events import Died, GatewaySeen, PoolTick, Publish, StartWorker
from deploy.pools.orders import (
    Abort,
    AddVersion,
    Drain,
    Finish,
    Flip,
    OrderRefused,
    SetPools,
    SetWeights,
    Stop,
)
from deploy.pools.versions.rollout import MAX_VERSIONS
from deploy.pools.workers.record import WorkerState
from engine.config import WorkerConfig
from engine.control import GatewayReport, Pools, Version
from engine.layout import KVFormat
from engine.messages import Role, WorkerId
from tests.kits.pools import PoolWorld, check_refused, settled

INT8 = WorkerConfig(kv_dtype=KVFormat.INT8)
V2 = Version("v2", "other", "other", INT8, Pools(1, 1), weight=0)


def named(name: str, pools: Pools = V2.pools, weight: int = 0) -> Version:
    return msgspec.structs.replace(V2, name=name, pools=pools, weight=weight)


def by_version(world: PoolWorld) -> dict[str, int]:
    found: dict[str, int] = {}
    for process in world.processes.values():
        found[process.version] = found.get(process.version, 0) + 1
    return found


def weights(world: PoolWorld) -> dict[str, int]:
    return {version.name: version.weight for version in world.machine.intent.versions}


def updating() -> PoolWorld:
    """Returns four workers in pools where v2 starts to take over, with room for two more
    workers."""
    world = settled(Pools(2, 2), max_workers=6)
    world.feed(AddVersion(named("v2", Pools(2, 2)), takes_over=True))
    return world


def with_canary(*arguments, **options) -> PoolWorld:
    """Returns pools in which v2 serves beside v1."""
    world = settled(*arguments, **options)
    world.feed(AddVersion(named("v2", weight=10), takes_over=False))
    world.settle()
    return world


def with_two_canaries() -> PoolWorld:
    world = settled(Pools(2, 2), max_workers=10)
    world.feed(AddVersion(named("v2", Pools(1, 2), weight=10), takes_over=False))
    world.feed(AddVersion(named("v3", Pools(1, 1), weight=5), takes_over=False))
    world.settle()
    return world


def test_version_takes_over_worker_by_worker():
    world = updating()
    shares = [weights(world)]
    for _ in range(200):
        world.run(1)
        assert len(world.processes) <= 6
        if shares[-1] != weights(world):
            shares.append(weights(world))
    assert world.machine.is_settled
    assert by_version(world) == {"v2": 4}
    assert [version.name for version in world.machine.intent.versions] == ["v2"]
    of_v2 = [share["v2"] for share in shares]
    assert of_v2 == sorted(of_v2)
    assert of_v2[0] == 0
    assert of_v2[-1] == 100
    assert len(of_v2) > 3
    assert world.machine.members.of("v1") == ()
    assert {member.version for member in world.machine.members.workers} == {"v2"}


def test_version_keeps_its_workers_until_its_last_request():
    world = settled()
    world.requests["v1"] = 1
    world.feed(AddVersion(V2, takes_over=True))
    world.run(150)
    assert by_version(world) == {"v1": 2, "v2": 2}
    assert weights(world) == {"v1": 0, "v2": 100}
    assert world.machine.intent.version("v1").is_leaving
    assert not world.machine.is_settled
    world.requests["v1"] = 0
    world.settle()
    assert by_version(world) == {"v2": 2}


def test_report_on_earlier_members_is_ignored():
    world = settled(gateways=("gateway-0", "gateway-1"))
    world.requests["v1"] = 1
    world.feed(AddVersion(V2, takes_over=True))
    world.run(100)
    world.silent.add("gateway-1")
    world.feed(GatewaySeen("gateway-1", GatewayReport(None, 1, 2, 0, 0, 0.0)))
    world.requests["v1"] = 0
    world.run(100)
    assert by_version(world) == {"v1": 2, "v2": 2}
    world.feed(GatewaySeen("gateway-1", None))
    world.run(10)
    assert by_version(world) == {"v1": 2, "v2": 2}
    world.feed(Died("gateway-1", "it ended"))  # the gateway's requests fail too
    world.silent.clear()
    world.settle()
    assert by_version(world) == {"v2": 2}


def test_version_that_does_not_start_is_given_up():
    world = settled(Pools(2, 1))
    world.bad_versions.add("v2")
    world.feed(AddVersion(V2, takes_over=True))
    world.settle()
    assert by_version(world) == {"v1": 3}
    assert weights(world) == {"v1": 100}
    assert world.machine.counters["updates given up"] == 1
    assert any(
        "v2 leaves: v1 goes on" in line and "3 times in a row" in line for line in world.told
    )


def test_version_that_fails_half_way_gives_everything_back():
    world = updating()
    while by_version(world).get("v2", 0) < 3:
        world.run(1)
    world.bad_versions.add("v2")
    for name, process in list(world.processes.items()):
        if process.version == "v2":
            world.die(name)
    world.settle(1000)
    assert by_version(world) == {"v1": 4}
    assert world.machine.intent.pools == Pools(2, 2)


def test_update_that_gateways_cannot_follow_is_given_up():
    world = settled(update_timeout_s=90.0)
    world.missing["v2"] = "it cannot be loaded"
    world.feed(AddVersion(V2, takes_over=True))
    world.run(world.machine.limits.pools.update_timeout_s + 20)
    world.settle()
    assert by_version(world) == {"v1": 2}
    assert any("no step in 90 s" in line for line in world.told)


REMOTE = msgspec.structs.replace(V2, model="hf://org/other")


@pytest.mark.parametrize(("version", "is_waited_for"), [(REMOTE, True), (V2, False)])
def test_fetch_does_not_count_towards_the_update_deadline(version, is_waited_for):
    world = settled(update_timeout_s=90.0)
    world.start_s = world.machine.limits.pools.update_timeout_s + 60
    world.feed(AddVersion(version, takes_over=True))
    world.settle()
    assert by_version(world) == {"v2" if is_waited_for else "v1": 2}


def test_repeated_fetch_does_not_count_either():
    world = settled(update_timeout_s=90.0)
    world.start_s = world.machine.limits.pools.update_timeout_s + 60
    world.fails.append("the hub cannot be asked")
    world.feed(AddVersion(REMOTE, takes_over=True))
    world.settle(800)
    assert by_version(world) == {"v2": 2}


@pytest.mark.parametrize("version", [V2, REMOTE])
def test_update_with_unreachable_workers_is_given_up(version):
    world = settled(Pools(1, 1))
    world.unreachable_versions.add("v2")
    world.feed(AddVersion(version, takes_over=True))
    world.settle(400)
    assert by_version(world) == {"v1": 2}
    assert any(
        "v2 leaves: v1 goes on" in line and "3 times in a row" in line for line in world.told
    )


def test_dying_worker_does_not_delay_the_end_of_an_update():
    world = settled(update_timeout_s=250.0)
    world.start_s = 10.0
    world.missing["v2"] = "it cannot be loaded"
    world.feed(AddVersion(REMOTE, takes_over=True))
    for _ in range(6):  # each run is longer than `steady_s`, so each failure counts as the first
        world.run(75)
        for name in [name for name, p in world.processes.items() if p.version == "v2"]:
            if world.states()[name] is WorkerState.SERVING:
                world.die(name)
    assert by_version(world) == {"v1": 2}
    assert any("no step in 250 s" in line for line in world.told)


def test_versions_side_by_side_share_by_weight_and_scale_apart():
    world = with_canary()
    assert weights(world) == {"v1": 100, "v2": 10}
    world.feed(SetWeights({"v1": 60, "v2": 40}))
    world.feed(SetPools(Pools(1, 2), version="v2"))
    world.settle()
    assert by_version(world) == {"v1": 2, "v2": 3}
    assert weights(world) == {"v1": 60, "v2": 40}
    assert world.machine.intent.pools == Pools(1, 1)
    own = [name for name, p in world.processes.items() if p.version == "v2" and p.role.prefills]
    with pytest.raises(OrderRefused, match="last worker that prefills"):
        world.feed(Drain(WorkerId(own[0])))
    world.feed(Finish("v2"))
    world.settle()
    assert by_version(world) == {"v2": 3}


def test_abort_gives_back_workers_and_requests():
    world = updating()
    while by_version(world).get("v1") == 4:
        world.run(1)
    world.feed(Abort("v2"))
    assert weights(world) == {"v1": 100, "v2": 0}
    world.settle()
    assert by_version(world) == {"v1": 4}
    assert world.machine.intent.pools == Pools(2, 2)


def test_abort_restores_other_versions_too():
    world = with_two_canaries()
    before = world.machine.intent
    world.feed(Finish("v3", Pools(3, 3)))
    while by_version(world)["v2"] == 3:  # until v3 has got one of v2's workers
        world.run(1)
    world.feed(Abort("v3"))
    assert weights(world) == {"v1": 100, "v2": 10, "v3": 0}
    world.settle()
    assert world.machine.intent.versions == before.versions[:2]
    assert by_version(world) == {"v1": 4, "v2": 3}


def test_aborted_version_gets_nothing_back():
    world = with_two_canaries()
    world.feed(Finish("v3", Pools(3, 3)))
    while by_version(world)["v1"] == 4:
        world.run(1)
    world.feed(Abort("v3"))
    world.feed(Abort("v2"))
    world.settle()
    assert by_version(world) == {"v1": 4}


def test_reports_from_before_an_abort_end_no_workers():
    world = updating()
    heard = None
    while not weights(world)["v2"] or heard != world.machine.members:
        world.run(1)
        heard = world.machine.members
        world.report()
    # v2 may still receive requests until gateways know that v2 is being removed
    before = world.roles()
    world.feed(Abort("v2"))
    world.feed(PoolTick())
    assert world.roles() == before
    world.report()
    gone = [name for name, role in world.roles().items() if role is not before[name]]
    assert gone
    assert {world.processes[name].version for name in gone} == {"v2"}


def test_second_version_that_does_not_start_is_given_up():
    world = settled()
    world.bad_versions.add("v2")
    world.feed(AddVersion(named("v2", weight=10), takes_over=False))
    world.settle()
    assert weights(world) == {"v1": 100}
    assert world.machine.counters["updates given up"] == 1


def test_serving_second_version_survives_one_failing_worker():
    world = with_canary()
    world.bad_versions.add("v2")
    world.feed(SetPools(Pools(1, 2), version="v2"))
    world.run(200)
    assert by_version(world) == {"v1": 2, "v2": 2}
    assert weights(world) == {"v1": 100, "v2": 10}


def test_past_failures_of_a_serving_worker_do_not_end_an_update():
    world = settled(max_workers=10)
    world.feed(AddVersion(named("v2", Pools(1, 2), weight=10), takes_over=False))
    world.settle()
    often = min(name for name, p in world.processes.items() if p.version == "v2")
    for _ in range(3):
        world.die(often)
        world.run(1)
        world.settle()
    assert world.machine.restarts.is_looping(often)
    world.feed(Finish("v2"))
    world.settle()
    assert by_version(world) == {"v2": 3}
    assert not world.machine.counters["updates given up"]


def test_current_version_that_cannot_grow_stays():
    world = with_canary()
    world.bad_versions.add("v1")
    world.feed(Finish("v1", Pools(2, 1)))
    world.run(60)
    assert world.machine.intent.rollout is None
    assert any(
        "v1 keeps its present workers" in line and "3 times in a row" in line for line in world.told
    )
    world.feed(SetPools(Pools(1, 1)))  # orders are accepted again
    world.settle()
    assert by_version(world) == {"v1": 2, "v2": 2}


@pytest.mark.parametrize("max_workers", [4, 5, 8])
def test_split_version_may_become_mixed_by_a_rollout(max_workers):
    world = with_canary(max_workers=max_workers)
    world.feed(Finish("v2", Pools(0, 0, 2)))
    world.settle()
    assert by_version(world) == {"v2": 2}
    assert set(world.roles().values()) == {Role.MIXED}


def test_rounded_shares_converge():
    world = settled()
    world.feed(AddVersion(named("v2", weight=1), takes_over=False))
    world.feed(AddVersion(named("v3", weight=1), takes_over=False))
    world.feed(SetWeights({"v1": 100, "v2": 1, "v3": 0}))
    world.settle()
    world.feed(Finish("v1"))
    world.settle()
    assert weights(world) == {"v1": 100}
    assert by_version(world) == {"v1": 2}


def test_larger_update_uses_the_room_the_old_version_leaves():
    world = settled(Pools(1, 1), max_workers=4)
    world.feed(AddVersion(named("v2", Pools(2, 2)), takes_over=True))
    world.settle()
    assert by_version(world) == {"v2": 4}


@pytest.mark.parametrize(
    ("order", "reason", "status"),
    [
        (AddVersion(named("v1"), takes_over=True), "a version v1 already", 409),
        (AddVersion(named(""), takes_over=True), "cannot be the name", 400),
        (AddVersion(named("v2", Pools(0, 1)), takes_over=True), "need a prefill", 400),
        (AddVersion(named("v2", Pools(9, 9)), takes_over=True), "18 workers are more than", 409),
        (AddVersion(named("v2", weight=-1), takes_over=False), "a weight is between", 400),
        (
            AddVersion(named("v2", Pools(2, 2)), takes_over=False),
            "v2 needs 4 workers beside the 4 of other versions, and there can be 6: "
            "`baton pools set prefill=1 decode=1` would make room",
            409,
        ),
        (
            AddVersion(named("v2", Pools(5, 1)), takes_over=False),
            "more room is needed, see pools.max_workers",
            409,
        ),
        (SetWeights({"v9": 1}), "no version is called v9; there are: v1", 404),
        (SetWeights({"v1": 0}), "at least one version", 400),
        (SetWeights({"v1": -3}), "a weight is between", 400),
        (Finish("v9"), "no version is called v9", 404),
        (Finish("v1"), "v1 is the only version", 409),
        (Abort("v1"), "v1 is the current version", 409),
        (SetPools(Pools(1, 1), version="v9"), "no version is called v9", 404),
    ],
)
def test_refused_version_order_changes_nothing(order, reason, status):
    world = settled(Pools(2, 2), max_workers=6)
    check_refused(world, order, reason=reason, status=status)


def test_pools_and_weights_are_fixed_during_a_rollout():
    world = settled(Pools(2, 1))
    world.requests["v1"] = 1
    world.feed(AddVersion(V2, takes_over=True))
    for order in (
        SetPools(Pools(2, 1)),
        SetWeights({"v1": 1}),
        Finish("v2"),
        Drain(WorkerId("worker-0")),
        AddVersion(named("v3"), takes_over=False),
    ):
        with pytest.raises(OrderRefused, match="v2 is taking over"):
            world.feed(order)


def workers_of(world: PoolWorld, version: str, role: Role) -> list[WorkerId]:
    return [
        WorkerId(name)
        for name, process in sorted(world.processes.items())
        if process.version == version and process.role is role
    ]


def test_workers_of_the_new_version_take_orders_during_a_rollout():
    world = settled(Pools(2, 2))
    world.requests["v1"] = 1
    world.feed(AddVersion(named("v2", Pools(2, 3)), takes_over=True))
    while world.machine.serving("v2").total() < 5:
        world.run(1)
    drained = workers_of(world, "v2", Role.DECODE)[0]
    world.feed(Drain(drained))
    world.feed(Flip(workers_of(world, "v2", Role.DECODE)[1], Role.PREFILL))
    stopped = workers_of(world, "v2", Role.PREFILL)[0]
    world.feed(Stop(stopped))
    world.requests["v1"] = 0
    world.settle()
    assert by_version(world) == {"v2": 4}
    assert world.machine.intent.pools == Pools(2, 1)
    assert world.machine.intent.drained == (drained,)
    assert stopped not in world.processes


def test_last_worker_of_a_role_stays_during_a_rollout():
    world = settled()
    world.requests["v1"] = 1
    world.feed(AddVersion(V2, takes_over=True))
    world.run(100)
    with pytest.raises(OrderRefused, match="last worker that prefills"):
        world.feed(Drain(workers_of(world, "v2", Role.PREFILL)[0]))


def test_number_of_versions_is_limited():
    world = settled(max_workers=20)
    for i in range(2, MAX_VERSIONS + 1):
        world.feed(AddVersion(named(f"v{i}", weight=1), takes_over=False))
    with pytest.raises(OrderRefused, match="there are: v1, v2, v3, v4"):
        world.feed(AddVersion(named("w"), takes_over=False))
    world.settle()
    world.feed(Finish("v3"))
    world.settle()
    assert by_version(world) == {"v3": 2}


def test_next_controller_continues_an_update():
    world = updating()
    while by_version(world).get("v2", 0) < 3:
        world.run(1)
    before = world.machine.members
    world.queue.clear()
    world.replace_controller(before.intent, version=before.version)
    world.connect()
    world.settle()
    assert by_version(world) == {"v2": 4}


def test_workers_of_an_unknown_version_are_stopped():
    world = settled()
    for process in world.processes.values():
        process.version = "lost"
    world.replace_controller(world.machine.intent)
    world.connect()
    world.settle()
    assert by_version(world) == {"v1": 2}


def test_workers_start_with_their_versions_settings():
    world = settled()
    effects = world.machine.handle(AddVersion(named("v2", weight=1), takes_over=False), 0.0)
    started = [effect for effect in effects if isinstance(effect, StartWorker)]
    assert [(s.role, s.version.model, s.version.worker) for s in started] == [
        (Role.PREFILL, "other", INT8),
        (Role.DECODE, "other", INT8),
    ]
    assert {effect.members.intent.version("v2").weight for effect in effects if
            isinstance(effect, Publish)} == {1}  # fmt: skip


sizes = st.sampled_from([Pools(1, 1), Pools(2, 1), Pools(1, 2), Pools(0, 0, 1), Pools(2, 2)])
version_names = st.sampled_from(["v1", "v2", "v3"])
worker_names = st.sampled_from([WorkerId(f"worker-{i}") for i in range(9)])
actions = st.one_of(
    st.builds(AddVersion, st.builds(named, version_names, sizes, st.integers(0, 9)), st.booleans()),
    st.builds(SetWeights, st.dictionaries(version_names, st.integers(0, 9), max_size=2)),
    st.builds(Finish, version_names, st.none() | sizes),
    st.builds(Abort, version_names),
    st.builds(SetPools, sizes, version=version_names),
    st.builds(Flip, worker_names, st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED])),
    st.builds(Stop, worker_names),
    st.tuples(st.just("run"), st.sampled_from([1, 5, 40])),
    st.tuples(st.just("requests"), version_names),
    st.tuples(st.just("die"), st.integers(0, 8)),
    st.tuples(st.just("bad"), version_names),
)


@settings(max_examples=60, deadline=None)
@given(first=sizes, script=st.lists(actions, max_size=12), seed=st.integers(0, 99))
def test_any_orders_converge_and_no_version_with_requests_loses_its_workers(first, script, seed):
    world = PoolWorld(first, max_workers=7)
    world.rng = random.Random(seed)
    world.feed(PoolTick())
    world.run(20)
    for each in script:
        match each:
            case ("run", seconds):
                world.run(seconds)
            case ("requests", name):
                version = world.machine.intent.version(name)
                if version is not None and not version.is_leaving:
                    world.requests[name] = 1
            case ("die", number):
                able = [n for n in sorted(world.processes) if world.machine.workers[n].is_connected]
                if number < len(able):
                    world.die(able[number])
            case ("bad", name):
                world.bad_versions ^= {name}
            case order:
                try:
                    world.feed(order)
                except OrderRefused:
                    world.machine.validate()
        there = {version.name for version in world.machine.intent.versions if not version.is_over}
        assert all(name in there for name, number in world.requests.items() if number)
    world.bad_versions.clear()
    world.requests.clear()
    world.run(2)
    world.settle(4000)
    intent = world.machine.intent
    for version in intent.versions:
        counts = [
            sum(p.role is role and p.version == version.name for p in world.processes.values())
            for role in (Role.PREFILL, Role.DECODE, Role.MIXED)
        ]
        assert Pools(*counts) == version.pools
    assert len(world.processes) == sum(version.pools.total for version in intent.versions)
