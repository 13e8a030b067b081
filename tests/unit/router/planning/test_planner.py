"""The planner of pools: its plans for measured loads, and when it makes no plan."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_rules

from engine.demand import DecodeCost, Observation
from engine.messages import Role, WorkerId
from router.planning.planner import FlipCandidate, Planner, PlannerRules, PoolPlan, PoolSizes, flips

COST = DecodeCost(fixed_s=0.010, row_s=2e-5, context_s=3e-8)
RULES = PlannerRules(ttft_s=5.0, tpot_s=0.025)
QUIET = Observation(decode_cost=COST)


def seen(prefill_s_per_s=0.0, decoding=0, **more):
    """Returns an observation with prompts of one second each and sequences of 8,000 tokens."""
    return Observation(
        requests_per_s=prefill_s_per_s,
        prefill_s_per_s=prefill_s_per_s,
        num_decoding=decoding,
        context_tokens=8000 * decoding,
        reserved_tokens=9000 * decoding,
        decode_cost=COST,
        **more,
    )


def pools(prefill, decode, **more):
    return PoolSizes(prefill, decode, kv_tokens=700_000, max_running=256, **more)


def at_rest(start, rules=RULES):
    """Returns a planner that has observed these pools without load for a minute."""
    planner = Planner(rules)
    planner.decide(None, start, -60.0)
    return planner


def check(observation, start, rules=RULES):
    """Returns the plan after the first observation of a load; the pools are a minute old."""
    return at_rest(start, rules).decide(observation, start, 0.0)


def after(observations, start, rules=RULES):
    """Returns the plan after one second of each observation; earlier plans are applied at once."""
    planner = at_rest(start, rules)
    plan = None
    for second, observation in enumerate(observations):
        plan = planner.decide(observation, start, float(second))
        start = replace(start, prefill=plan.prefill, decode=plan.decode)
    return plan


# ---------------------------------------------------------------- sizes of pools


def test_a_load_that_fits_leaves_the_pools_as_they_are():
    plan = after([seen(2.0, 100)] * 60, pools(4, 12))
    assert (plan.prefill, plan.decode, plan.nodes) == (4, 12, 16)
    assert any("no flip: neither pool is short" in reason for reason in plan.reasons)


def test_a_short_prefill_pool_takes_idle_decode_workers():
    plan = after([seen(10.0, 20)] * 10, pools(2, 14))
    assert plan.prefill >= 12  # 10 s of prompts per second, at 85 % use
    assert plan.prefill + plan.decode == 16


def test_a_decode_pool_that_fills_up_takes_prefill_workers_before_it_is_full():
    filling = [seen(1.0, 30 * second) for second in range(8)]
    plan = after(filling, pools(13, 3))
    # 210 sequences take 55 ms for rows and context: 3.9 workers at 24 ms, and 30 more arrive a
    # second.
    assert plan.decode >= 9


def test_a_queue_is_answered_at_the_first_look():
    plan = check(seen(3.0, 20, queued_s=10.0), pools(4, 12))
    assert plan.prefill >= 7
    assert "10.00 s wait" in plan.reasons[0]


def test_requests_waiting_for_decode_count_there():
    waiting = seen(1.0, 90, num_queued=200, queued_tokens=200 * 8000)
    plan = check(waiting, pools(8, 2))
    assert plan.decode > 4


def test_running_sequences_keep_their_workers():
    planner = at_rest(pools(2, 14))
    busy = seen(30.0, 600, queued_s=300.0)  # needs 11.4 decode workers
    plan = planner.decide(busy, pools(2, 14), 0.0)
    assert (plan.prefill, plan.decode) == (4, 12)
    plan = planner.decide(seen(30.0, 300, queued_s=300.0), pools(4, 12), 1.0)
    assert (plan.prefill, plan.decode) == (10, 6)


def test_at_most_half_of_a_pool_goes_at_once():
    plan = check(seen(30.0, 0, queued_s=300.0), pools(1, 15))
    assert plan.decode == 8


def test_short_memory_counts_like_pace():
    plenty = replace(seen(0.5, 10), reserved_tokens=4_000_000)
    plan = check(plenty, pools(8, 2))
    assert plan.decode >= 6


def test_without_a_bound_on_pace_memory_and_places_alone_count():
    plan = after([seen(1.0, 600)] * 2, pools(8, 2), PlannerRules())
    assert plan.decode >= 8  # 9,000 tokens per sequence need 8.1 workers


def test_a_bound_that_no_worker_can_keep_is_left_out():
    rules = PlannerRules(tpot_s=0.009)
    assert check(seen(1.0, 70), pools(4, 4), rules).decode == 4


@given(
    prefill=st.integers(0, 40),
    decode=st.integers(0, 40),
    work=st.floats(0, 100),
    decoding=st.integers(0, 5000),
    queued_s=st.floats(0, 1000),
    limits=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(5, 50), st.integers(5, 50)),
)
def test_the_total_is_kept_and_the_limits_are_too(
    prefill, decode, work, decoding, queued_s, limits
):
    rules = with_rules(
        RULES,
        min_prefill=limits[0],
        min_decode=limits[1],
        max_prefill=limits[2],
        max_decode=limits[3],
    )
    start = pools(prefill, decode)
    plan = check(seen(work, decoding, queued_s=queued_s), start, rules)
    assert plan.prefill + plan.decode == prefill + decode
    assert min(plan.prefill, plan.decode) >= 0
    changed = plan.prefill != prefill
    if changed:
        assert limits[0] <= plan.prefill <= limits[2]
        assert limits[1] <= plan.decode <= limits[3]
    assert plan.reasons


@given(st.floats(0, 100), st.integers(0, 5000), st.integers(1, 31))
def test_equal_facts_give_equal_plans(work, decoding, prefill):
    start, observations = pools(prefill, 32 - prefill), [seen(work, decoding)] * 5
    assert after(observations, start) == after(observations, start)


# ---------------------------------------------------------------- plans that are not made


def test_a_flip_that_gains_little_is_not_made():
    # The pools need 8.6 of 8 and 8 of 8 workers: one flip would only move the shortage.
    plan = check(seen(7.3, 420), pools(8, 8))
    assert plan.prefill == 8
    assert any("it would gain" in reason for reason in plan.reasons)


def test_noise_does_not_make_workers_go_to_and_fro():
    rng, start, num_flips, decoding = Random(0), pools(12, 4), 0, 130
    planner = at_rest(start)
    for second in range(600):
        arrived = sum(rng.random() < 0.1 for _ in range(100))
        decoding += arrived - sum(rng.random() < 1 / 13 for _ in range(decoding))
        plan = planner.decide(seen(float(arrived), decoding), start, float(second))
        num_flips += abs(plan.prefill - start.prefill)
        start = replace(start, prefill=plan.prefill, decode=plan.decode)
    assert num_flips <= 2


def test_no_worker_goes_back_before_the_other_direction_has_cooled_down():
    planner = Planner(RULES)
    planner.decide(seen(10.0, 20, queued_s=10.0), pools(2, 14), 0.0)
    swing = seen(1.0, 700)
    back = planner.decide(swing, pools(12, 4), 1.0)  # the first plan was applied
    assert back.prefill == 12
    assert any("prefill grew 0.0 s ago" in reason for reason in back.reasons)
    late = [planner.decide(swing, pools(12, 4), 1.0 + second) for second in range(1, 17)]
    assert late[-1].prefill < 12


def test_nothing_is_decided_while_workers_change_but_not_for_ever():
    planner, load = Planner(RULES), seen(10.0, 20, queued_s=20.0)
    changing = pools(2, 14, num_changing=1)
    plans = [planner.decide(load, changing, float(second)) for second in range(31)]
    assert all(plan.prefill == 2 for plan in plans[:30])
    assert "1 workers are changing" in plans[0].reasons[0]
    assert plans[30].prefill > 2  # a worker that never starts does not block the planner


def test_a_worker_that_never_comes_is_wanted_and_keeps_its_place_but_is_no_capacity():
    rules = with_rules(RULES, max_workers=8, grow_after_s=5.0)
    there = pools(4, 4, num_changing=2, absent_prefill=2, room=8)
    planner, load = at_rest(pools(4, 4, room=8), rules), seen(5.0, 100)
    plans = [planner.decide(load, there, float(second)) for second in range(40)]
    assert plans[29].is_held
    assert "prefill needs 5.9 of 2" in plans[30].reasons[0]
    assert (plans[30].prefill, plans[30].decode) == (6, 2)  # 4 and 2 of these workers serve
    assert all((plan.prefill + plan.decode, plan.nodes) == (8, 8) for plan in plans)


@given(
    sizes=st.tuples(*[st.integers(0, 10)] * 4),
    work=st.floats(0, 40),
    decoding=st.integers(0, 2000),
    room=st.integers(0, 30),
)
def test_absent_workers_count_towards_the_target_size(sizes, work, decoding, room):
    prefill, decode, absent_prefill, absent_decode = sizes
    absent = {
        "absent_prefill": min(absent_prefill, prefill),
        "absent_decode": min(absent_decode, decode),
    }
    rules = with_rules(RULES, max_workers=20, grow_after_s=0.0, change_timeout_s=0.0)
    start = pools(prefill, decode, num_changing=1, room=room, **absent)
    plan = check(seen(work, decoding), start, rules)
    assert plan.prefill >= absent["absent_prefill"]
    assert plan.decode >= absent["absent_decode"]
    assert plan.prefill + plan.decode <= max(room, start.total)
    assert plan.nodes <= max(20, start.total)


def test_each_change_has_a_deadline_of_its_own():
    planner, load = Planner(RULES), seen(10.0, 20, queued_s=20.0)
    for second in range(40):
        planner.decide(load, pools(2, 14, num_changing=1), float(second))
    plans = [planner.decide(load, pools(4, 12, num_changing=3), 40.0 + t) for t in range(31)]
    assert all(plan.is_held for plan in plans[:30])
    assert not plans[30].is_held


def test_missing_reports_shrink_nothing_until_a_gateway_counts_as_gone():
    planner, load = Planner(RULES), seen(10.0, 20, queued_s=20.0)
    plans = [planner.decide(load, pools(2, 14, num_gateways=2), float(t)) for t in range(31)]
    assert all(plan.prefill == 2 for plan in plans[:30])
    assert plans[30].prefill > 2


def test_without_any_report_nothing_is_decided():
    planner = Planner(with_rules(RULES, shrink_after_s=1.0))
    plans = [planner.decide(None, pools(2, 14), 10.0 * tick) for tick in range(20)]
    assert {(plan.prefill, plan.decode, plan.nodes) for plan in plans} == {(2, 14, 16)}
    assert plans[-1].reasons == ("nothing: no gateway reports",)
    assert plans[-1].is_held


def test_the_planner_continues_from_an_operator_s_edit():
    planner, load = Planner(RULES), seen(6.0, 20)
    for second in range(20):
        planner.decide(load, pools(8, 8), float(second))
    edited = planner.decide(load, pools(3, 13), 20.0)
    assert edited.prefill == 3  # decode grew only a moment ago
    later = [planner.decide(load, pools(3, 13), 20.0 + second) for second in range(1, 17)]
    assert later[-1].prefill >= 7


def test_new_planner_waits_for_one_cool_down():
    planner, load = Planner(RULES), seen(10.0, 20, queued_s=20.0)
    plans = [planner.decide(load, pools(2, 14), 100.0 + second) for second in range(16)]
    assert all(plan.prefill == 2 for plan in plans[:15])
    assert "decode grew 0.0 s ago" in " ".join(plans[0].reasons)
    assert plans[15].prefill > 2


def test_an_order_outside_of_the_limits_stays_until_it_has_cooled_down():
    planner = at_rest(pools(8, 8), with_rules(RULES, min_prefill=6))
    plans = [planner.decide(QUIET, pools(2, 14), float(second)) for second in range(16)]
    assert all(plan.prefill == 2 for plan in plans[:15])
    assert "6 to 15 may prefill, but the pools changed 1.0 s ago" in " ".join(plans[1].reasons)
    assert plans[15].prefill == 6


def test_limits_that_are_set_later_are_carried_out():
    plan = check(QUIET, pools(2, 14), with_rules(RULES, min_prefill=6))
    assert plan.prefill == 6


def test_limits_that_cannot_be_kept_are_reported():
    plan = check(QUIET, pools(2, 2), with_rules(RULES, min_prefill=3, min_decode=3))
    assert plan.prefill == 2
    assert any("leave no choice" in reason for reason in plan.reasons)


def test_no_workers_are_no_error():
    plan = check(QUIET, pools(0, 0))
    assert (plan.prefill, plan.decode) == (0, 0)


# ---------------------------------------------------------------- nodes


def test_nodes_are_asked_for_when_flips_do_not_help_and_it_lasts():
    rules = with_rules(RULES, max_workers=24)
    overload = [seen(17.0, 300)] * 31
    assert after(overload[:30], pools(10, 6), rules).nodes == 16
    assert after(overload, pools(10, 6), rules).nodes == 24  # 26 nodes would be needed


def test_the_total_stays_without_a_limit():
    assert after([seen(17.0, 300)] * 60, pools(10, 6)).nodes == 16
    assert after([seen(2.0, 60)] * 301, pools(8, 8)).nodes == 16


def test_new_workers_join_the_shorter_pool_within_room():
    rules = with_rules(RULES, max_workers=24)
    overload = [seen(17.0, 300)] * 31
    plan = after(overload, pools(10, 6, room=19), rules)
    assert (plan.prefill + plan.decode, plan.nodes) == (19, 24)
    assert (plan.prefill, plan.decode) == (13, 6)  # 20 and 6 workers are needed
    # there is no room, so no worker is stopped
    assert after(overload, pools(10, 6, room=12), rules).prefill == 10
    plan = after(overload, pools(10, 6, room=30), rules)
    assert (plan.prefill, plan.decode) == (18, 6)


def test_workers_leave_the_pool_with_more_to_spare():
    rules = with_rules(RULES, max_workers=16)
    plan = after([seen(2.0, 60)] * 301, pools(8, 8, room=16), rules)
    assert (plan.prefill, plan.decode) == (5, 3)


def test_a_total_that_grew_is_not_taken_back_for_a_quiet_hour_before():
    planner = at_rest(pools(1, 1), with_rules(RULES, max_workers=16))
    for second in range(1000):
        planner.decide(QUIET, pools(1, 1, room=16), float(second))
    grown = pools(3, 3, room=16)
    plans = [planner.decide(QUIET, grown, 1000.0 + second) for second in range(301)]
    assert all((plan.prefill, plan.decode) == (3, 3) for plan in plans[:300])
    assert plans[300].nodes == 2


def test_a_total_that_shrank_is_not_brought_back_for_a_busy_hour_before():
    planner, busy = at_rest(pools(3, 3), with_rules(RULES, max_workers=6)), seen(17.0, 300)
    for second in range(1000):
        planner.decide(busy, pools(3, 3, room=6), float(second))
    plans = [planner.decide(busy, pools(2, 2, room=6), 1000.0 + second) for second in range(31)]
    assert all(plan.nodes == 4 for plan in plans[:30])
    assert plans[30].nodes == 6


def test_a_flip_does_not_restart_the_wait_for_nodes():
    planner, busy = at_rest(pools(8, 8), with_rules(RULES, max_workers=24)), seen(17.0, 300)
    for second in range(20):
        planner.decide(busy, pools(8, 8), float(second))
    plans = [planner.decide(busy, pools(10, 6), 20.0 + second) for second in range(11)]
    assert [plan.nodes for plan in plans] == [16] * 10 + [24]


def test_a_total_outside_of_its_bounds_is_brought_inside_when_it_has_cooled_down():
    rules = with_rules(RULES, min_workers=6, max_workers=8)
    for total in (4, 10):
        plan = check(QUIET, pools(total // 2, total // 2, room=16), rules)
        assert plan.nodes == plan.prefill + plan.decode == min(max(total, 6), 8)
        assert "there are to be 6 to 8" in plan.reasons[-1]
    planner = at_rest(pools(4, 4), rules)
    plans = [planner.decide(QUIET, pools(5, 5, room=16), float(second)) for second in range(16)]
    assert all(plan.nodes == 10 for plan in plans[:15])
    assert plans[15].nodes == 8


def test_nodes_are_given_back_only_after_minutes_of_little_to_do():
    rules = with_rules(RULES, min_workers=4, max_workers=16)
    little = [seen(2.0, 60)] * 301
    assert after(little[:300], pools(8, 8), rules).nodes == 16
    assert after(little, pools(8, 8), rules).nodes == 8  # the load needs 5 nodes at 70 % use
    rules = with_rules(RULES, min_workers=12, max_workers=16)
    assert after(little, pools(8, 8), rules).nodes == 12


def test_a_busy_moment_restarts_the_wait():
    little, busy = [seen(2.0, 60)] * 200, [seen(14.0, 60)] * 5
    rules = with_rules(RULES, max_workers=16)
    assert after([*little, *busy, *little], pools(8, 8), rules).nodes == 16


# ---------------------------------------------------------------- sums, and flipped workers


def test_gateways_add_up():
    one = seen(2.0, 30, queued_s=1.0)
    other = replace(seen(1.0, 10, num_queued=4), decode_cost=None)
    both = other + one
    assert both.num_gateways == 2
    assert both.prefill_s_per_s == pytest.approx(3.0)
    assert (both.num_decoding, both.num_queued, both.queued_s) == (40, 4, 1.0)
    assert both.decode_cost == COST


def test_one_prompt_in_each_worker_does_not_wait():
    assert seen(4.0, prefilling_s=3.0).waiting_s(4) == 0.0
    assert seen(4.0, prefilling_s=6.0, queued_s=1.0).waiting_s(4) == pytest.approx(3.0)


def test_the_cheapest_workers_are_flipped():
    members = [
        FlipCandidate(WorkerId("a"), Role.DECODE, 5.0),
        FlipCandidate(WorkerId("b"), Role.DECODE, 1.0),
        FlipCandidate(WorkerId("c"), Role.DECODE, 1.0),
        FlipCandidate(WorkerId("d"), Role.PREFILL, 0.0),
        FlipCandidate(WorkerId("e"), Role.MIXED, 0.0),
    ]
    more, fewer = PoolPlan(3, 1, 4, ()), PoolPlan(0, 4, 4, ())
    assert flips(more, members) == [("b", Role.PREFILL), ("c", Role.PREFILL)]
    assert flips(fewer, members) == [("d", Role.DECODE)]
    assert flips(PoolPlan(1, 3, 4, ()), members) == []
