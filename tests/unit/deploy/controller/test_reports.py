"""The messages that a controller sends to gateways."""

from deploy.controller.reports import MAX_TEXT, cluster_report
from deploy.pools.events import Connected, PoolTick, StartWorker, WorkerStarted
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import AddVersion
from deploy.pools.planning import Planning
from deploy.pools.state import PoolLimits
from engine.control import Intent, Pools, Version, decode_from_controller, encode_control
from engine.layout import KVFormat
from router.planning.planner import PlannerRules
from tests.kits.pools import settled


def news(machine, **changed):
    planning = Planning(machine, PlannerRules(), order=lambda _: None)
    parts = {"workers": {}, "gateways": {}, "counters": {"workers died": 1}, **changed}
    return cluster_report(machine, planning, admin_url="http://a:1", epoch_s=1000.0, **parts)


def test_news_have_workers_versions_and_the_history_in_unix_time():
    machine = PoolMachine(
        Intent((Version(pools=Pools(1, 1)),)), limits=PoolLimits(4), gateways=["gateway"]
    )
    for effect in machine.handle(PoolTick(), 1.0):
        if isinstance(effect, StartWorker):
            name = effect.worker_id
            machine.handle(WorkerStarted(name, effect.start, name), 2.0)
            machine.handle(Connected(name, name, effect.role, KVFormat.FP32), 3.0)
    told = news(machine)
    assert [each.worker_id for each in told.workers] == ["worker-0", "worker-1"]
    assert {each.state for each in told.workers} == {"serving"}
    assert told.versions[0].serving == told.versions[0].wanted == Pools(1, 1)
    assert told.steps[0].at_s == 1001.0
    assert told.gateways[0].name == "gateway"
    assert decode_from_controller(encode_control([told])) == [told]


def test_news_have_the_standing_of_a_version_that_takes_over():
    world = settled(Pools(1, 1))
    assert news(world.machine).canary is None
    world.ends = {"v1": (10, 0, 0), "v2": (1, 0, 0)}
    v2 = Version("v2", "m", "m", pools=Pools(1, 1), weight=0)
    world.feed(AddVersion(v2, takes_over=True, canary=(5, 50), hold_s=60.0))
    assert news(world.machine).canary.verdict == "not probed yet"
    world.run(15)
    told = news(world.machine)
    canary = told.canary
    assert (canary.name, canary.weight, canary.shares) == ("v2", 5, (5, 50))
    assert canary.verdict == "too few requests to judge"
    assert canary.own.ended < canary.others.ended
    assert 1000.0 + world.now_s - 15 < canary.since_s < 1000.0 + world.now_s
    assert decode_from_controller(encode_control([told])) == [told]


def test_unchanged_news_are_equal_and_long_texts_are_cut():
    machine = PoolMachine(Intent((Version(pools=Pools(1, 1)),)), limits=PoolLimits(4))
    assert news(machine) == news(machine)
    machine.state.record(1.0, "pools", "x" * 5000)
    assert len(news(machine).steps[-1].what) <= MAX_TEXT + 1
