"""The controller's metrics."""

from deploy.controller.metrics import controller_families
from deploy.pools.events import (
    Connected,
    Died,
    NodesSeen,
    PoolTick,
    ServiceStarted,
    StartWorker,
    WorkerStarted,
)
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import AddVersion
from deploy.pools.planning import Planning, rules_of
from deploy.pools.state import PoolLimits
from engine.config import Config
from engine.control import Intent, Pools, Version
from engine.layout import KVFormat
from engine.messages import Role
from tests.kits.pools import settled
from tests.kits.tree.metric_table import store_report


def machine_with_workers() -> PoolMachine:
    """Returns a machine with one prefill and one decode worker, both serving."""
    machine = PoolMachine(
        Intent((Version(pools=Pools(1, 1)),)), limits=PoolLimits(4), gateways=["gateway"]
    )
    for effect in machine.handle(PoolTick(), 0.0):
        if isinstance(effect, StartWorker):
            name = effect.worker_id
            machine.handle(WorkerStarted(name, effect.start, f"{name}:1", 64), 0.0)
            machine.handle(Connected(name, f"{name}:1", effect.role, KVFormat.FP32), 0.0)
    return machine


def values(machine, name: str, **changes) -> dict[tuple[str, ...], float]:
    planning = Planning(machine, rules_of(Config()), order=lambda _: None)
    given = {"counters": {}, "health": {}, "price_per_hour": None, "stores": {}, **changes}
    return {
        tuple(sample.labels.values()): sample.value
        for family in controller_families(machine, planning, **given)
        for sample in family.samples
        if sample.name == name
    }


def test_workers_are_counted_by_state():
    machine = machine_with_workers()
    found = values(machine, "baton_pool_workers")
    assert found["v1", "prefill", "serving"] == found["v1", "decode", "serving"] == 1
    assert found["v1", "decode", "waiting"] == 0


def test_a_restart_raises_a_series_that_was_there_before():
    machine = machine_with_workers()
    names = [name for name, worker in machine.workers.items() if worker.target is Role.DECODE]
    assert values(machine, "baton_service_restarts_total")[names[0],] == 0
    for at_s in (1.0, 2.0):
        machine.handle(Died(names[0], "killed"), at_s)
        found = values(machine, "baton_service_restarts_total")
    assert found == {**dict.fromkeys(found, 0.0), (names[0],): found[names[0],]}
    assert found[names[0],] >= 1


def test_a_price_gives_the_cost_of_workers_that_run():
    machine = machine_with_workers()
    assert values(machine, "baton_cost_per_hour") == {}
    assert values(machine, "baton_cost_per_hour", price_per_hour=1.5) == {(): 3.0}


def test_parts_of_ray_and_troubles_are_shown():
    machine = machine_with_workers()
    health = {"gcs": False, "raylet": True}
    assert values(machine, "baton_launcher_up", health=health) == {("gcs",): 0, ("raylet",): 1}
    counters = {"workers died": 3}
    assert values(machine, "baton_pool_events_total", counters=counters) == {("workers died",): 3}


def test_canary_is_counted_beside_the_others():
    world = settled(Pools(1, 1))
    assert set(values(world.machine, "baton_canary_verdict").values()) == {0}
    assert set(values(world.machine, "baton_canary_requests").values()) == {0}
    world.ends = {"v1": (10, 1, 2), "v2": (3, 0, 0)}
    v2 = Version("v2", "m", "m", pools=Pools(1, 1), weight=0)
    world.feed(AddVersion(v2, takes_over=True, canary=(5,), hold_s=60.0))
    world.run(30)
    verdicts = values(world.machine, "baton_canary_verdict")
    assert [name for name, is_it in verdicts.items() if is_it] == [("good_so_far",)]
    found = values(world.machine, "baton_canary_requests")
    assert found["new_version", "other"] >= 20
    assert found["others", "late"] == 2 * found["others", "failed"] > 0
    assert found["others", "other"] == 7 * found["others", "failed"]


def test_planner_decisions_begin_at_zero_for_each_kind():
    found = values(machine_with_workers(), "baton_planner_decisions_total")
    assert set(found.values()) == {0}
    assert ("flip", "done") in found
    assert ("grow", "only_told") in found


def test_stores_are_shown_with_their_tiers():
    limits = PoolLimits(4, has_stores=True)
    machine = PoolMachine(Intent((Version(pools=Pools(1, 1)),)), limits=limits)
    machine.handle(NodesSeen(("", "n2")), 0.0)
    machine.handle(PoolTick(), 0.0)
    machine.handle(ServiceStarted("store-v1", "tcp://s"), 0.0)
    given = {"stores": {"store-v1": store_report(), "store-v1@n2": None}}
    assert values(machine, "baton_pool_stores", **given) == {
        ("v1", "waiting"): 0,
        ("v1", "starting"): 1,
        ("v1", "serving"): 1,
        ("v1", "stopping"): 0,
    }
    up = values(machine, "baton_store_up", **given)
    assert up == {("store-v1", "v1", ""): 1, ("store-v1@n2", "v1", "n2"): 0}
    assert values(machine, "baton_store_tier_up", **given) == {
        ("store-v1", "host"): 1,
        ("store-v1", "disk"): 0,
    }
    assert values(machine, "baton_store_capacity_bytes", **given)["store-v1", "disk"] == 8 * 4096
    assert values(machine, "baton_store_new_blocks", **given) == {("store-v1",): 3}
    assert ("store-v1",) in values(machine, "baton_service_restarts_total", **given)


def test_without_stores_there_are_no_series_of_them():
    assert values(machine_with_workers(), "baton_store_up") == {}
