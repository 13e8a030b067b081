"""Further models: each has its own versions, sleeps when idle, and wakes for requests."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.pools.events import PoolTick
from deploy.pools.orders import Abort, AddVersion, Finish, OrderRefused, SetPools, SetWeights
from engine.control import Pools, Version
from engine.messages import Role
from tests.kits.pools import CONTEXT_LEN, PoolWorld, check_refused, model_version, settled

IDLE_S = 30.0
SMALL = {"small": Pools(1, 1)}


def with_small(*, max_workers: int = 8, idle_s: float = IDLE_S) -> PoolWorld:
    return settled(Pools(1, 1), max_workers, others=SMALL, idle_s={"small": idle_s})


def workers_of(world: PoolWorld, version: str) -> int:
    return sum(process.version == version for process in world.processes.values())


def state_of(world: PoolWorld, name: str) -> Version:
    version = world.machine.intent.version(name)
    assert version is not None
    return version


def test_idle_model_sleeps_and_a_request_wakes_it():
    world = with_small()
    world.run(IDLE_S - 5)
    assert workers_of(world, "small-v1") == 2
    world.run(20)
    world.settle()
    assert workers_of(world, "small-v1") == 0
    assert workers_of(world, "v1") == 2
    asleep = state_of(world, "small-v1").asleep
    assert asleep is not None
    assert (asleep.pools, asleep.context_len) == (Pools(1, 1), CONTEXT_LEN)
    assert any("small-v1 falls asleep" in line and "30 s" in line for line in world.told)

    world.requests["small-v1"] = 1
    world.run(10)
    world.settle()
    assert workers_of(world, "small-v1") == 2
    assert state_of(world, "small-v1").asleep is None
    assert any("small-v1 wakes" in line for line in world.told)
    world.run(10 * IDLE_S)
    assert workers_of(world, "small-v1") == 2, "it has a request"


def test_requests_between_two_looks_count_as_use():
    world = with_small()
    world.ends["small-v1"] = (1, 0, 0)
    world.run(5 * IDLE_S)
    assert workers_of(world, "small-v1") == 2
    world.ends["small-v1"] = (0, 0, 0)
    world.run(IDLE_S + 20)
    assert workers_of(world, "small-v1") == 0


def test_model_without_an_idle_time_never_sleeps():
    world = settled(others=SMALL)
    world.pass_quietly(10_000)
    world.run(20)
    assert workers_of(world, "small-v1") == 2


def test_no_model_sleeps_while_a_gateway_is_silent():
    world = with_small()
    world.silent.add("gateway")
    world.feed(PoolTick())
    world.run(1)
    world.machine.members = msgspec.structs.replace(world.machine.members, version=99)
    world.run(3 * IDLE_S)
    assert workers_of(world, "small-v1") == 2


def test_request_during_the_drain_wakes_it_again():
    world = with_small()
    while state_of(world, "small-v1").asleep is None:
        world.run(1)
    world.requests["small-v1"] = 1
    world.run(2)
    world.settle()
    assert workers_of(world, "small-v1") == 2


def two_models(max_workers: int) -> PoolWorld:
    """Two further models, with room for only one of them. Both are starting."""
    both = {"small": Pools(1, 1), "tiny": Pools(1, 1)}
    world = settled(Pools(1, 1), 6, others=both, idle_s={"small": 100.0, "tiny": 100.0})
    world.ends["tiny-v1"] = (1, 0, 0)
    world.run(110)
    world.settle()
    assert state_of(world, "small-v1").asleep is not None
    world.machine.state.limit(max_workers, "see pools.max_workers")
    world.ends["tiny-v1"] = (0, 0, 0)
    world.run(1)
    return world


def test_idle_model_gives_way_to_one_that_is_asked_for():
    world = two_models(max_workers=4)
    world.requests["small-v1"] = 1
    world.run(10)
    world.settle()
    assert [workers_of(world, name) for name in ("v1", "small-v1", "tiny-v1")] == [2, 2, 0]
    assert any("tiny-v1 falls asleep: small-v1 needs its room" in line for line in world.told)


def test_busy_model_keeps_its_workers_and_the_lack_of_room_is_reported():
    world = two_models(max_workers=4)
    world.requests["tiny-v1"] = world.requests["small-v1"] = 1
    world.run(60)
    assert [workers_of(world, name) for name in ("v1", "small-v1", "tiny-v1")] == [2, 0, 2]
    [said] = world.machine.troubles()
    assert said.startswith("small-v1 is asked for and cannot wake: there can be 4 workers")
    world.requests["tiny-v1"] = 0
    world.run(10)
    world.settle()
    assert [workers_of(world, name) for name in ("v1", "small-v1", "tiny-v1")] == [2, 2, 0]
    assert world.machine.troubles() == ()


def test_update_of_one_model_leaves_the_other_alone():
    world = settled(Pools(1, 1), others=SMALL)
    newer = msgspec.structs.replace(model_version("small", Pools(1, 2)), name="small-v2")
    world.feed(AddVersion(newer, takes_over=True))
    world.settle()
    assert [v.name for v in world.machine.intent.versions] == ["v1", "small-v2"]
    assert [workers_of(world, name) for name in ("v1", "small-v1", "small-v2")] == [2, 0, 3]
    assert [v.weight for v in world.machine.intent.versions] == [100, 100]

    world.feed(AddVersion(Version("v2", "other", "main"), takes_over=True))
    world.settle()
    assert [v.name for v in world.machine.intent.versions] == ["v2", "small-v2"]
    assert world.machine.intent.current.name == "v2"


def test_aborted_update_gives_back_to_its_own_model_only():
    world = settled(Pools(1, 1), others=SMALL)
    newer = msgspec.structs.replace(model_version("small", Pools(1, 2)), name="small-v2")
    world.feed(AddVersion(newer, takes_over=True))
    world.run(3)
    world.feed(Abort("small-v2"))
    world.settle()
    assert [v.name for v in world.machine.intent.versions] == ["v1", "small-v1"]
    assert [workers_of(world, name) for name in ("v1", "small-v1", "small-v2")] == [2, 2, 0]


def test_model_that_is_updated_stays_awake():
    world = with_small()
    newer = msgspec.structs.replace(model_version("small", Pools(1, 1)), name="small-v2")
    world.probes["small-v2"] = None  # the probe has no result for a long time
    world.feed(AddVersion(newer, takes_over=True))
    world.run(2 * IDLE_S)
    assert workers_of(world, "small-v1") == 2
    world.probes.clear()
    world.run(30)
    assert state_of(world, "small-v2").asleep is None or workers_of(world, "small-v2") == 0


def test_orders_about_a_model_are_checked_within_its_line():
    world = settled(Pools(1, 1), others=SMALL)
    check_refused(world, Finish("small-v1"), reason="is the only version", status=409)
    check_refused(world, Abort("small-v1"), reason="is the current version", status=409)
    check_refused(
        world, SetWeights({"small-v1": 0}), reason="must have a weight above 0", status=400
    )
    taken = Version("v2", "other", "small", pools=Pools(1, 1))
    check_refused(
        world,
        AddVersion(taken, takes_over=True),
        reason="small-v1 serves the name small already",
        status=409,
    )


def test_order_of_pools_wakes_a_model():
    world = with_small()
    world.run(IDLE_S + 20)
    assert workers_of(world, "small-v1") == 0
    world.feed(SetPools(Pools(2, 1), version="small-v1"))
    world.settle()
    assert workers_of(world, "small-v1") == 3


ORDERS = st.sampled_from(
    [
        SetPools(Pools(1, 2), version="small-v1"),
        SetPools(Pools(2, 1)),
        AddVersion(Version("v2", "other", "main"), takes_over=True),
        AddVersion(
            msgspec.structs.replace(model_version("small", Pools(1, 1)), name="small-v2"),
            takes_over=True,
        ),
        Abort("v2"),
        Abort("small-v2"),
    ]
)
EVENTS = st.one_of(
    st.tuples(st.just("run"), st.integers(1, 60)),
    st.tuples(st.just("requests"), st.sampled_from(["v1", "small-v1", "tiny-v1", "small-v2"])),
    st.tuples(st.just("end"), st.sampled_from(["v1", "small-v1", "tiny-v1", "small-v2"])),
    st.tuples(st.just("die"), st.integers(0, 5)),
    ORDERS,
)


def fits_requests(world: PoolWorld) -> bool:
    """Returns True if models with requests have workers of both roles, and idle models have
    none."""
    intent = world.machine.intent
    for version in intent.versions:
        own = [p.role for p in world.processes.values() if p.version == version.name]
        if world.requests[version.name]:
            if not (any(r.prefills for r in own) and any(r.decodes for r in own)):
                return False
        elif own and version.line and len(intent.of_line(version.line)) == 1:
            return False
    return Role.DRAINED not in world.roles().values()


@settings(max_examples=settings().max_examples // 3)
@given(script=st.lists(EVENTS, max_size=15))
def test_whatever_happens_models_with_requests_have_workers_at_last(script):
    models = {"small": Pools(1, 1), "tiny": Pools(0, 0, 1)}
    world = PoolWorld(
        Pools(1, 1), max_workers=6, others=models, idle_s={"small": 20.0, "tiny": 10.0}
    )
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
            case ("end", name):
                world.requests[name] = 0
            case ("die", number):
                able = [n for n in sorted(world.processes) if world.machine.workers[n].is_connected]
                if number < len(able):
                    world.die(able[number])
            case order:
                try:
                    world.feed(order)
                except OrderRefused:
                    world.machine.validate()
    asked = next((name for name, number in world.requests.items() if number), None)
    world.requests.clear()
    if asked is not None:
        world.requests[asked] = 1
    world.run_until(lambda: fits_requests(world), 400)
    world.run(60)
    assert fits_requests(world)
