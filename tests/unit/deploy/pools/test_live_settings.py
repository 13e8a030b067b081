"""Settings changed by an operator apply at once, and also in the next controller."""

from deploy.controller.plan import ControllerPlan
from deploy.pools.events import Overtaken, PoolTick
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Adjust
from deploy.pools.state import PoolLimits
from engine.config import Config, PlannerConfig, PoolsConfig, UpdateConfig
from engine.control import LiveSettings, Members, Pools
from tests.kits.pools import PoolWorld, intent_of, settled

LIVE = LiveSettings(
    PoolsConfig(spares=1, drain_timeout_s=7.0, max_workers=9),
    UpdateConfig(hold_s=3.0),
    PlannerConfig(min_prefill=2),
)


def held(machine: PoolMachine) -> tuple[int, float, int, float]:
    limits = machine.limits
    pools = limits.pools
    return pools.spares, pools.drain_timeout_s, limits.max_workers, limits.update.hold_s


def test_a_change_holds_at_once_and_outlives_the_controller():
    world = settled(Pools(1, 1))
    world.feed(Adjust(LIVE))
    assert held(world.machine) == (1, 7.0, 9, 3.0)
    world.settle()
    assert any(worker.is_spare for worker in world.machine.workers.values())
    again = PoolMachine(world.machine.intent, limits=PoolLimits(4))
    assert held(again) == (1, 7.0, 9, 3.0)


def test_a_controller_that_guessed_learns_the_settings_from_a_gateway():
    machine = PoolMachine(intent_of(Pools(1, 1)), limits=PoolLimits(4), is_guess=True)
    machine.handle(Overtaken(Members(5, (), intent_of(Pools(1, 1), live=LIVE))), 1.0)
    assert held(machine) == (1, 7.0, 9, 3.0)


def test_room_that_is_seen_later_counts_unless_it_is_configured():
    world = PoolWorld(Pools(1, 1), max_workers=4)
    world.feed(Adjust(LiveSettings(PoolsConfig(), UpdateConfig(), PlannerConfig())))
    world.feed(PoolTick())
    assert world.machine.limits.max_workers == 4


def test_the_plan_has_the_settings_of_the_intent():
    config = Config(pools=PoolsConfig(spares=3))
    plan = ControllerPlan("", config, Pools(), token="", cores=1)
    assert plan.under(intent_of(Pools(1, 1))) is plan
    changed = plan.under(intent_of(Pools(1, 1), live=LIVE)).config
    assert (changed.pools, changed.update, changed.planner) == (
        LIVE.pools,
        LIVE.update,
        LIVE.planner,
    )
