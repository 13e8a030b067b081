"""The demand that one gateway reports to the planner of pools."""

from dataclasses import replace

import pytest

from engine.messages import Role
from engine.worker.blocks import hash_blocks
from router.machine.events import Tick
from router.machine.requests import Rejected
from router.planning.demand import members
from router.planning.planner import Planner, PlannerRules, PoolSizes
from tests.kits.router.demand import COSTS, ask, machine_of
from tests.kits.router.machine import LAYOUT


def test_arrivals_are_rates_since_the_last_look():
    machine = machine_of(Role.PREFILL, Role.DECODE)
    machine.demand.observe(0.0)
    for number in range(4):
        ask(machine, f"r{number}")
    seen = machine.demand.observe(2.0)
    assert seen.requests_per_s == pytest.approx(2.0)
    assert seen.prefill_s_per_s == pytest.approx(4 * 0.4 / 2)
    assert seen.output_tokens_per_s == pytest.approx(4 * 10 / 2)
    again = machine.demand.observe(3.0)
    assert (again.requests_per_s, again.prefill_s_per_s) == (0.0, 0.0)


def test_wait_for_prefill_is_reported_in_seconds():
    machine = machine_of(Role.PREFILL, Role.DECODE, Role.DECODE)
    machine.demand.observe(0.0)
    for number in range(3):
        ask(machine, f"r{number}")
    seen = machine.demand.observe(1.0)
    assert seen.num_decoding == 1
    assert (seen.prefilling_s, seen.queued_s) == (pytest.approx(0.4), pytest.approx(0.8))
    assert (seen.num_queued, seen.queued_tokens) == (0, 0)


def test_requests_queued_before_the_first_observation_count():
    machine = machine_of(Role.PREFILL, Role.DECODE, Role.DECODE)
    for number in range(3):
        ask(machine, f"r{number}")
    assert machine.demand.observe(1.0).queued_s == pytest.approx(0.8)


@pytest.mark.parametrize("after_s", [0.01 * number for number in range(8)])
def test_wait_for_prefill_counts_without_a_prediction(after_s):
    """Other prompts wait behind a late first prompt, so no start can be predicted for the next
    prompt."""
    machine = machine_of(Role.PREFILL, Role.DECODE, Role.DECODE, num_blocks=1000)
    machine.demand.observe(0.0)
    for number in range(7):
        ask(machine, f"r{number}", num_tokens=4)
    machine.handle(Tick(), 1.0 + after_s)
    seen = machine.demand.observe(1.0 + after_s)
    assert (seen.num_queued, seen.queued_tokens) == (0, 0)
    assert seen.queued_s == pytest.approx(0.04 * machine.queue_len)
    assert machine.queue_len > 3


@pytest.mark.parametrize("after_s", [0.0, 0.05])
def test_waiting_prompts_get_more_prefill_workers_even_if_the_first_are_late(after_s):
    machine = machine_of(*[Role.PREFILL] * 2, *[Role.DECODE] * 4, num_blocks=1000)
    machine.demand.observe(0.0)
    for number in range(100):
        ask(machine, f"r{number}", num_tokens=4)
    machine.demand.observe(1.0)  # observes only that requests wait
    machine.handle(Tick(), 1.0 + after_s)
    seen = machine.demand.observe(1.0 + after_s)
    planner = Planner(PlannerRules(ttft_s=1.0, tpot_s=0.1, cool_down_s=0.0))
    plan = planner.decide(seen, PoolSizes(2, 4, kv_tokens=4000, max_running=4), 1.0 + after_s)
    assert (plan.prefill, plan.decode) == (4, 2), plan.reasons


def test_without_prefill_workers_all_wait_for_one():
    machine = machine_of(Role.DECODE)
    machine.demand.observe(0.0)
    ask(machine, "r")
    seen = machine.demand.observe(1.0)
    assert (seen.num_queued, seen.queued_s) == (0, pytest.approx(0.4))


def test_wait_for_decode_is_reported_in_requests():
    machine = machine_of(
        Role.PREFILL, Role.PREFILL, Role.DECODE, num_blocks=LAYOUT.num_blocks_for(50)
    )
    for number in range(3):
        ask(machine, f"r{number}")
    seen = machine.demand.observe(1.0)
    assert seen.num_decoding == 1
    assert (seen.num_queued, seen.queued_tokens, seen.queued_s) == (2, 80, 0.0)


def test_refused_requests_count_as_demand():
    machine = machine_of(Role.PREFILL, Role.DECODE, slo_ttft_s=0.1)
    machine.demand.observe(0.0)
    [end] = ask(machine, "r")
    assert isinstance(end.outcome, Rejected)
    assert machine.demand.observe(1.0).prefill_s_per_s == pytest.approx(0.4)


def test_prompts_that_decode_workers_take_from_a_busy_pool_are_its_demand():
    machine = machine_of(Role.DECODE, fluid=True)
    machine.demand.observe(0.0)
    ask(machine, "a")
    ask(machine, "b")  # this request waits
    assert machine.queue_len == 1
    seen = machine.demand.observe(1.0)
    assert (seen.prefill_s_per_s, seen.queued_s) == (pytest.approx(0.8), pytest.approx(0.4))
    assert seen.prefilling_s == 0.0


def test_prompts_that_are_quicker_in_a_decode_worker_are_not():
    machine = machine_of(Role.PREFILL, Role.DECODE, fluid=True)
    machine.demand.observe(0.0)
    first = ord("a")
    cached = hash_blocks(list(range(first, first + 40)), LAYOUT.block_size)
    machine.prefixes.record("decode-1", cached)
    [send] = ask(machine, "a")
    assert send.worker_id == "decode-1"
    assert machine.demand.observe(1.0).prefill_s_per_s == 0.0


def test_without_workers_nothing_is_predicted():
    machine = machine_of()
    ask(machine, "r")
    assert machine.demand.observe(1.0).decode_cost is None


def test_decode_costs_come_from_decode_workers():
    assert machine_of(Role.PREFILL, Role.DECODE).demand.observe(0.0).decode_cost == COSTS.decode
    assert machine_of(Role.PREFILL).demand.observe(0.0).decode_cost is None


def test_members_count_in_the_pool_of_their_ordered_role():
    machine = machine_of(Role.PREFILL, Role.DECODE)
    ask(machine, "r")
    first, second = members(machine.view, {"decode-1": Role.PREFILL})
    assert (first.role, first.work_tokens) == (Role.PREFILL, 40)
    assert (second.role, second.work_tokens) == (Role.PREFILL, 40)
    assert replace(second, role=Role.DECODE) == members(machine.view)[1]


def test_however_many_ask_it_is_observed_once_a_second():
    machine = machine_of(Role.PREFILL, Role.DECODE)
    observer = machine.demand
    assert observer.latest(0.0) is None
    ask(machine, "r")
    assert observer.latest(0.5) is None  # the report was for another controller
    first = observer.latest(1.0)
    assert first.requests_per_s == pytest.approx(1.0)
    assert observer.latest(1.5) is first
    assert observer.latest(2.0).requests_per_s == 0.0


def test_demand_starts_fresh_after_a_rest(monkeypatch):
    machine = machine_of(Role.PREFILL, Role.DECODE)
    observer = machine.demand
    observer.latest(0.0)
    assert observer.latest(1.0) is not None
    observer.rest()
    with monkeypatch.context() as patch:
        patch.setattr(machine.demand, "_prefill_s", lambda *_: 1 / 0)
        ask(machine, "meanwhile")
    assert observer.latest(60.0) is None
    ask(machine, "r")
    assert observer.latest(61.0).requests_per_s == pytest.approx(1.0)


def test_nothing_is_looked_up_without_an_observer(monkeypatch):
    machine = machine_of(Role.PREFILL, Role.DECODE)
    monkeypatch.setattr(machine.demand, "_prefill_s", lambda *_: 1 / 0)
    ask(machine, "early")
    machine.demand.observe(0.0)
    with pytest.raises(ZeroDivisionError):
        ask(machine, "late")
