"""The planner on live pools: its observations, and the orders that follow from its plans."""

from dataclasses import replace

import msgspec
import pytest
from msgspec.structs import replace as with_rules

from deploy.pools.events import (
    Connected,
    Disconnected,
    PoolTick,
    RoleSeen,
    RoomSeen,
    SetWorkerRole,
    StartWorker,
    WorkerStarted,
)
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Drain, Flip, OrderRefused, SetPlanner, SetPools
from deploy.pools.planning import DecisionKind, DecisionOutcome, Planning, rules_of
from deploy.pools.state import PoolLimits
from engine.config import (
    Config,
    PlannerConfig,
    PlannerMode,
    PoolsConfig,
    RouterConfig,
    WorkerConfig,
)
from engine.control import MAIN_LINE, NO_WORKERS, Asleep, GatewayReport, Pools
from engine.demand import DecodeCost, Observation
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, Role, Welcome
from router.planning.planner import PlannerRules
from tests.kits.pools import intent_of, model_version

LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
COST = DecodeCost(fixed_s=0.010, row_s=2e-4, context_s=0.0)
READING = Observation(
    requests_per_s=3.0, prefill_s_per_s=3.0, queued_s=3.0, num_decoding=2, decode_cost=COST
)
WRITING = Observation(requests_per_s=1.0, num_decoding=280, decode_cost=COST)
RULES = PlannerRules(ttft_s=2.0, tpot_s=0.03)


class World:
    """A machine whose effects are carried out at once, and a planner of its pools."""

    def __init__(self, pools, rules=RULES, max_workers=8, mode=PlannerMode.ON, **more):
        self.machine = PoolMachine(
            intent_of(pools, planner=mode), limits=PoolLimits(max_workers), gateways=["gateway"]
        )
        self.now_s = 0.0
        self.obeys = True
        self.planning = Planning(self.machine, rules, order=self.feed, **more)
        self.feed(PoolTick())
        self.rest()

    def rest(self):
        """Runs until an active planner has observed these pools for a minute."""
        self.tick()
        self.now_s += 60.0

    def feed(self, event):
        """Handles an event and carries out its effects at once."""
        for effect in self.machine.handle(event, self.now_s):
            match effect:
                case StartWorker(name, role, start) if self.obeys:
                    self.feed(WorkerStarted(name, start, name))
                    self.feed(Connected(name, name, role, KVFormat.FP32))
                case SetWorkerRole(name, role) if self.obeys:
                    self.feed(RoleSeen(name, name, role))

    def tick(self, *seen, seconds=1):
        """For some seconds, feeds a report of each gateway; None means silence.

        Returns a decision.
        """
        reports = [
            None if one is None else GatewayReport(None, 1, 2, 0, 0, 0.0, {MAIN_LINE: one})
            for one in seen
        ]
        found = None
        for _ in range(seconds):
            self.now_s += 1.0
            found = next(iter(self.planning.tick(reports, self.infos(), self.now_s)), found)
        return found

    def infos(self):
        return {
            name: Welcome(PROTOCOL_VERSION, name, "inc", w.role, "fp", LAYOUT, 1000, 64)
            for name, w in self.machine.workers.items()
        }

    @property
    def wanted(self):
        return self.machine.intent.pools


# ---------------------------------------------------------------- orders from plans


def test_changing_load_flips_workers_there_and_back():
    world = World(Pools(2, 2))
    first = world.tick(READING)
    assert (first.before, first.after) == (Pools(2, 2), Pools(3, 1))
    assert first.outcome is DecisionOutcome.DONE
    assert world.wanted == Pools(3, 1)
    assert [w.role for w in world.machine.workers.values()].count(Role.PREFILL) == 3
    assert world.tick(WRITING, seconds=14) is None  # the planner is in its cool-down
    last = world.tick(WRITING, seconds=3)
    assert last.after.decode > 1
    assert world.planning.decisions[0] == first
    assert list(world.planning.decisions)[-1] == last
    assert world.planning.counts == {(DecisionKind.FLIP, DecisionOutcome.DONE): last.number}


def test_dry_run_reports_once_and_changes_nothing():
    world = World(Pools(2, 2), mode=PlannerMode.DRY_RUN)
    told = world.tick(READING)
    assert (told.after, told.outcome) == (Pools(3, 1), DecisionOutcome.ONLY_TOLD)
    assert str(told) == "prefill 2 → 3, decode 2 → 1: only told"
    assert any("requests/s" in reason for reason in told.reasons)
    assert world.tick(READING, seconds=20) is None
    assert len(world.planning.decisions) == 1
    assert world.wanted == Pools(2, 2)
    world.feed(SetPlanner(PlannerMode.ON))
    assert world.tick(READING).outcome is DecisionOutcome.DONE


def test_planner_that_is_off_says_nothing_and_forgets():
    world = World(Pools(2, 2), mode=PlannerMode.OFF)
    assert world.tick(READING, seconds=3) is None
    assert world.planning.reasons == ()
    world.feed(SetPlanner(PlannerMode.ON))
    world.rest()
    world.tick(READING)
    world.feed(SetPlanner(PlannerMode.OFF))
    world.tick(WRITING, seconds=60)
    assert world.wanted == Pools(3, 1)
    world.feed(SetPlanner(PlannerMode.ON))
    assert world.tick(WRITING, seconds=15) is None  # the planner does not know earlier orders
    assert world.tick(WRITING).after == Pools(2, 2)


def test_refused_decision_is_kept_once_with_its_reason():
    world = World(Pools(2, 2))

    def refuse(order):
        raise OrderRefused("not now")

    planning = world.planning = Planning(world.machine, RULES, order=refuse)
    world.rest()
    decision = world.tick(READING, seconds=5)
    assert (decision.outcome, decision.why_refused) == (DecisionOutcome.REFUSED, "not now")
    assert str(decision).endswith("refused (not now)")
    assert len(planning.decisions) == 1
    assert world.wanted == Pools(2, 2)


def test_operators_order_is_not_taken_back_at_once():
    world = World(Pools(3, 1))
    world.tick(READING)
    world.feed(SetPools(Pools(1, 3)))
    assert world.tick(READING, seconds=15) is None
    assert "decode grew" in " ".join(world.planning.reasons)
    assert world.tick(READING, seconds=3).after.prefill > 1
    world.feed(Flip("worker-0", Role.DECODE))
    assert world.tick(READING) is None


# ---------------------------------------------------------------- observations


def test_reports_add_up_and_a_silent_gateway_pauses_the_planner():
    world = World(Pools(2, 2))
    assert world.tick(READING, None, seconds=29) is None
    assert "1 gateways are silent" in world.planning.reasons[0]
    half = replace(READING, prefill_s_per_s=1.5, queued_s=1.5)
    assert world.tick(half, half).after == Pools(3, 1)


def test_planner_waits_while_a_worker_changes():
    world = World(Pools(3, 2))
    world.obeys = False
    for order in (Flip("worker-0", Role.DECODE), SetPools(Pools(2, 4)), SetPools(Pools(2, 1))):
        world.feed(order)
        assert world.tick(READING) is None
        assert "are changing" in world.planning.reasons[0]
    world = World(Pools(2, 2))
    world.feed(Disconnected("worker-2", "worker-2", "gone"))
    assert world.tick(READING) is None
    assert "1 workers are changing" in world.planning.reasons[0]


def test_missing_workers_stay_wanted_but_are_no_capacity():
    world = World(Pools(2, 4), with_rules(RULES, cool_down_s=0.0))
    world.obeys = False
    world.feed(SetPools(Pools(4, 4)))
    assert world.tick(READING, seconds=30) is None
    decision = world.tick(READING)
    assert "of 2: 3.0 requests/s" in decision.reasons[0]
    assert decision.after.total == 8
    assert decision.after.prefill > 4


def test_drained_and_mixed_workers_do_not_count():
    world = World(Pools(2, 2, 1))
    world.feed(Drain("worker-3"))
    assert world.tick(WRITING).after == Pools(1, 2, 1)


def test_only_mixed_workers_are_not_planned():
    world = World(Pools(0, 0, 2))
    assert world.tick(READING) is None
    assert world.planning.reasons == (
        "nothing: mixed workers are not split, and there are no others",
    )


def test_planner_pauses_during_an_update_and_starts_fresh():
    world = World(Pools(2, 2))
    alone = world.machine.intent
    other = msgspec.structs.replace(alone.current, name="other", weight=0)
    world.machine.state.intent = msgspec.structs.replace(alone, versions=(*alone.versions, other))
    assert world.tick(READING) is None
    assert "several versions" in world.planning.reasons[0]
    world.machine.state.intent = alone
    assert world.tick(READING, seconds=15) is None  # the planner does not know earlier orders
    assert world.tick(READING).after == Pools(3, 1)


def with_small(**options) -> World:
    """Returns a world with a second model. Both models have been observed for a minute."""
    world = World(Pools(2, 2), **options)
    intent = world.machine.intent
    small = model_version("small", Pools(2, 2))
    versions = (*intent.versions, small)
    world.machine.state.intent = msgspec.structs.replace(intent, versions=versions)
    world.feed(PoolTick())
    world.rest()
    return world


def test_each_model_is_planned_by_its_own_load():
    world = with_small()
    report = GatewayReport(None, 1, 2, 0, 0, 0.0, {MAIN_LINE: WRITING, "small": READING})
    decisions = world.planning.tick([report], world.infos(), world.now_s)
    assert [(each.model, each.after) for each in decisions] == [
        ("", Pools(1, 3)),
        ("small", Pools(3, 1)),
    ]
    assert str(decisions[1]) == "small: prefill 2 → 3, decode 2 → 1: done"
    assert world.planning.reasons[-1].startswith("small: ")
    assert world.machine.intent.version("small-v1").pools == Pools(3, 1)
    assert world.wanted == Pools(1, 3)


def test_a_model_that_sleeps_is_not_planned():
    world = with_small()
    asleep = Asleep(Pools(2, 2), 4096)
    intent = world.machine.intent.changed("small-v1", pools=NO_WORKERS, asleep=asleep)
    world.machine.state.intent = intent
    world.feed(PoolTick())
    report = GatewayReport(None, 1, 2, 0, 0, 0.0, {MAIN_LINE: WRITING, "small": READING})
    decisions = world.planning.tick([report], world.infos(), world.now_s)
    assert [each.model for each in decisions] == [""]
    assert world.planning.reasons[-1] == "small: nothing: it sleeps"


def test_room_is_asked_for_all_models_together():
    rules = with_rules(RULES, max_workers=6, grow_after_s=3.0, shrink_after_s=5.0)
    world = with_small(rules=rules, max_workers=8)
    flood = replace(READING, prefill_s_per_s=9.0)
    report = GatewayReport(None, 1, 2, 0, 0, 0.0, {MAIN_LINE: flood, "small": flood})
    for second in range(10):
        world.planning.tick([report], world.infos(), world.now_s + second)
    assert world.planning.room_for == 12
    assert world.machine.intent.num_wanted == 8


def test_memory_and_slots_are_taken_from_the_workers():
    world = World(Pools(3, 1), with_rules(RULES, tpot_s=None))
    decision = world.tick(replace(WRITING, num_decoding=128))
    assert decision.after == Pools(2, 2)
    assert "decode needs 2.0 of 1" in decision.reasons[1]  # 64 sequences in each worker


# ---------------------------------------------------------------- nodes

GROWING = with_rules(RULES, max_workers=6, grow_after_s=3.0, shrink_after_s=5.0)


def test_planner_starts_workers_or_asks_for_room():
    world = World(Pools(2, 2), GROWING, max_workers=5)
    flood = replace(READING, prefill_s_per_s=9.0)
    world.tick(flood, seconds=4)
    assert world.wanted == Pools(4, 1)
    assert world.planning.room_for == 6
    last = world.planning.decisions[-1]
    assert (last.after.total, last.num_workers) == (5, 6)
    assert str(last) == "prefill 3 → 4, room for 6 workers: done"
    world.tick(flood, seconds=2)
    assert str(world.planning.decisions[-1]) == "room for 6 workers: done"
    world.feed(RoomSeen(7, "nodes have come"))
    world.tick(flood)
    assert world.wanted == Pools(5, 1)
    assert world.planning.room_for == 6
    world.feed(SetPlanner(PlannerMode.OFF))
    world.tick(flood)
    assert world.planning.room_for == 0


def test_idle_workers_are_given_back():
    world = World(Pools(3, 2), GROWING)
    quiet = replace(WRITING, num_decoding=1)
    assert world.tick(quiet, seconds=7).after == Pools(1, 1)
    assert world.planning.room_for == 2
    assert len([w for w in world.machine.workers.values() if not w.leaves]) == 2


def test_dry_run_asks_for_no_room():
    world = World(Pools(2, 2), GROWING, max_workers=4, mode=PlannerMode.DRY_RUN)
    told = world.tick(replace(READING, prefill_s_per_s=9.0), seconds=10)
    assert told.num_workers == 6
    assert world.planning.room_for is None


@pytest.mark.parametrize(
    "order",
    [SetPlanner(PlannerMode.DRY_RUN), SetPlanner(PlannerMode.OFF), SetPools(Pools(0, 0, 4))],
)
def test_room_is_given_back_once_planning_ends(order):
    world = World(Pools(2, 2), GROWING, max_workers=4)
    flood = replace(READING, prefill_s_per_s=9.0)
    world.tick(flood, seconds=5)
    assert world.planning.room_for == 6
    world.feed(order)
    world.tick(flood)
    assert world.planning.room_for == 0


@pytest.mark.parametrize(
    ("mode", "rules", "room_for"),
    [
        (PlannerMode.OFF, GROWING, 0),
        (PlannerMode.DRY_RUN, GROWING, 0),
        (PlannerMode.ON, GROWING, None),  # the room is kept until the first decision
        (PlannerMode.OFF, RULES, None),  # a controller with fixed room never requests nodes
    ],
)
def test_room_of_an_earlier_controller_is_given_back_without_a_planner(mode, rules, room_for):
    assert World(Pools(2, 2), rules, mode=mode).planning.room_for is None
    assert World(Pools(2, 2), rules, mode=mode, took_over=True).planning.room_for == room_for


def test_room_is_not_asked_for_beyond_max_workers():
    world = World(Pools(2, 2, 1), GROWING, max_workers=6)
    world.feed(Drain("worker-3"))
    capped = World(Pools(2, 2, 1), GROWING, max_workers=6)
    capped.planning = Planning(capped.machine, GROWING, order=capped.feed, max_workers=6)
    capped.rest()
    capped.feed(Drain("worker-3"))
    for each in (world, capped):
        each.tick(replace(READING, prefill_s_per_s=9.0), seconds=10)
    assert world.planning.room_for == 8  # 6 workers of both pools, a mixed worker, a drained worker
    assert capped.planning.room_for == 6


# ---------------------------------------------------------------- configuration


def test_planner_follows_the_configured_bounds():
    config = Config(
        router=RouterConfig(slo_ttft_s=1.5, slo_tpot_s=0.05),
        planner=PlannerConfig(min_prefill=2, max_workers=9, cool_down_s=4.0),
    )
    rules = rules_of(config)
    assert (rules.ttft_s, rules.tpot_s, rules.min_prefill) == (1.5, 0.05, 2)
    assert (rules.max_workers, rules.cool_down_s) == (9, 4.0)
    assert rules_of(Config()) == PlannerRules()
    capped = Config(pools=PoolsConfig(max_workers=5), planner=PlannerConfig(max_workers=9))
    assert rules_of(capped).max_workers == 5
    few = Config(
        pools=PoolsConfig(max_workers=2), planner=PlannerConfig(min_prefill=2, max_workers=9)
    )
    assert rules_of(few).max_workers == 2


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"min_decode": 3, "max_decode": 2}, "planner.max_decode must not be below"),
        ({"min_prefill": 3, "max_workers": 3}, "planner.max_workers must not be below"),
    ],
)
def test_impossible_bounds_are_refused_by_name(wrong, name):
    with pytest.raises(ValueError, match=name):
        PlannerConfig(**wrong)


def test_planner_needs_equal_formats():
    worker = WorkerConfig(decode_kv_dtype=KVFormat.INT8)
    with pytest.raises(ValueError, match=r"planner.mode = on .* worker.decode_kv_dtype"):
        Config(worker=worker, planner=PlannerConfig(mode=PlannerMode.ON))


def test_the_planner_follows_other_bounds():
    world = World(Pools(2, 2))
    rules = PlannerRules(ttft_s=2.0, tpot_s=0.03, max_prefill=2)
    world.planning.follow(rules, None)
    world.rest()
    assert world.tick(READING, seconds=3) is None
    assert world.wanted == Pools(2, 2)
