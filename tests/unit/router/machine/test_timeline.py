"""The timeline: its stages sum to the client's waiting time, whatever happens in between."""

import itertools
import random

import msgspec
import pytest

from engine.messages import (
    DecodeStarted,
    FinishReason,
    GivenBack,
    KvReady,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Tokens,
)
from router.machine.events import ClientGone, WorkerLost
from router.machine.flight import MAX_STAYS, running_timeline
from router.machine.requests import Stay, Timeline, Update
from tests.kits.router.machine import LAYOUT, LEASE, Driver

ROUTE_S = 0.5  # seconds between receipt and `Driver.ask`


def to_first(timeline: Timeline) -> float:
    return (
        timeline.route_s + timeline.queue_s + timeline.prefill_queue_s + timeline.prefill_compute_s
    )


def to_second(timeline: Timeline) -> float:
    assert timeline.kv_wait_s is not None
    assert timeline.decode_queue_s is not None
    assert timeline.first_step_s is not None
    return timeline.kv_wait_s + timeline.decode_queue_s + timeline.first_step_s


def delivered(effects) -> Update:
    [deliver] = [e for e in effects if isinstance(e, Update)]
    return deliver


def stages(timeline: Timeline) -> tuple[float, ...]:
    first = (timeline.prefill_queue_s, timeline.prefill_compute_s)
    return (timeline.route_s, timeline.queue_s, *first)


def test_wait_in_the_router_counts_as_queue():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1)
    driver.ask("a")
    driver.ask("b")
    driver.now_s += 2
    driver.handle(ClientGone(RequestId("a")))
    driver.say("p0", PrefillStarted("b.0", 3, LEASE), after_s=4)
    deliver = delivered(driver.say("p0", PrefillDone("b.0", 9, None), after_s=8))
    assert stages(deliver.timeline) == (ROUTE_S, 2, 4, 8)
    assert deliver.timeline.num_cached_tokens == 3
    assert (deliver.timeline.prefill_worker, deliver.timeline.decode_worker) == ("p0", "d0")


def test_the_timeline_comes_with_the_first_two_tokens_and_the_end():
    driver = Driver("p0", "d0")
    driver.ask(max_tokens=20)
    driver.say("p0", PrefillStarted("r.0", 0, LEASE))
    first = delivered(driver.say("p0", PrefillDone("r.0", 9, None), after_s=1))
    assert first.timeline.first_step_s is None
    second = delivered(driver.say("d0", Tokens("r.0", [8, 7]), after_s=1))
    assert to_second(second.timeline) == 1
    third = driver.say("d0", Tokens("r.0", [6], FinishReason.STOP), after_s=1)
    stays = third[-1].timeline.stays
    assert third[-1].timeline == msgspec.structs.replace(second.timeline, stays=stays)


def test_mixed_worker_has_no_kv_wait():
    driver = Driver("m0")
    driver.ask()
    driver.say("m0", PrefillStarted("r.0", 0, None), after_s=1)
    driver.say("m0", PrefillDone("r.0", 9, None), after_s=1)
    driver.say("m0", DecodeStarted("r.0"), after_s=2)
    timeline = delivered(driver.say("m0", Tokens("r.0", [8]), after_s=4)).timeline
    assert (timeline.kv_wait_s, timeline.decode_queue_s, timeline.first_step_s) == (0, 2, 4)


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_attempts_lost_before_the_first_token_count_as_queue(num_lost):
    driver = Driver("p0", "d0")
    driver.ask()
    for number in range(num_lost):
        driver.say("p0", PrefillStarted(f"r.{number}", 0, LEASE), after_s=1)
        driver.say("p0", GivenBack(f"r.{number}", "lease expired"), after_s=1)
    driver.say("p0", PrefillStarted(f"r.{num_lost}", 0, LEASE), after_s=4)
    done = PrefillDone(f"r.{num_lost}", 9, None)
    timeline = delivered(driver.say("p0", done, after_s=8)).timeline
    assert stages(timeline) == (ROUTE_S, 2 * num_lost, 4, 8)
    assert timeline.attempts == num_lost + 1


def test_an_attempt_lost_after_the_first_token_changes_nothing_before_it():
    driver = Driver("p0", "d0", "d1")
    driver.ask(max_tokens=20)
    driver.say("p0", PrefillStarted("r.0", 0, LEASE), after_s=1)
    driver.say("d0", KvReady("r.0", 2, 0, "shm"), after_s=1)
    first = delivered(driver.say("p0", PrefillDone("r.0", 9, None), after_s=1))
    driver.say("d0", DecodeStarted("r.0"), after_s=1)
    driver.now_s += 1
    driver.handle(WorkerLost("d0", "gone"))
    driver.say("p0", PrefillStarted("r.1", 4, LEASE), after_s=1)
    second = delivered(driver.say("p0", PrefillDone("r.1", 8, None), after_s=1))
    assert stages(second.timeline) == stages(first.timeline)
    assert to_second(second.timeline) == 4
    assert second.timeline.attempts == 2
    assert second.timeline.decode_worker == "d1"


def test_an_attempt_lost_after_the_second_token_changes_nothing_before_it():
    driver = Driver("p0", "d0")
    driver.ask(max_tokens=20)
    driver.say("p0", PrefillStarted("r.0", 4, LEASE), after_s=1)
    driver.say("p0", PrefillDone("r.0", 9, None), after_s=2)
    driver.say("d0", KvReady("r.0", 2, 0, "shm"), after_s=4)
    driver.say("d0", DecodeStarted("r.0"), after_s=8)
    second = delivered(driver.say("d0", Tokens("r.0", [8]), after_s=16)).timeline
    driver.say("d0", GivenBack("r.0", "preempted"), after_s=1)
    driver.say("p0", PrefillStarted("r.1", 0, LEASE), after_s=1)
    driver.say("d0", KvReady("r.1", 2, 0, "shm"), after_s=1)
    driver.say("p0", PrefillDone("r.1", 7, None), after_s=1)
    driver.say("d0", DecodeStarted("r.1"), after_s=1)
    *_, end = driver.say("d0", Tokens("r.1", [6], FinishReason.STOP), after_s=1)
    decision = end.timeline.decision  # decision of the latest attempt
    stays = end.timeline.stays
    assert len(stays) == 2
    assert end.timeline == msgspec.structs.replace(
        second, attempts=2, decision=decision, stays=stays
    )


def test_each_attempt_is_reported_with_its_workers_and_times():
    driver = Driver("p0", "d0", "d1")
    driver.ask(max_tokens=20)
    driver.say("p0", PrefillStarted("r.0", 0, LEASE), after_s=1)
    driver.say("p0", PrefillDone("r.0", 9, None), after_s=1)
    driver.say("d0", KvReady("r.0", 2, 0, "shm"), after_s=1)
    driver.say("d0", DecodeStarted("r.0"), after_s=1)
    driver.now_s += 1
    driver.handle(WorkerLost("d0", "gone"))
    flight = driver.machine.state.flights[RequestId("r")]
    lost, running = running_timeline(flight, driver.now_s).stays
    assert lost == Stay("p0", "d0", ROUTE_S, 1.5, 2.5, 3.5, 4.5, 5.5)
    assert running == Stay("p0", "d1", 5.5)
    driver.say("p0", PrefillStarted("r.1", 4, LEASE), after_s=1)
    driver.now_s += 1
    *_, end = driver.handle(ClientGone(RequestId("r")))
    assert end.timeline.stays == (lost, Stay("p0", "d1", 5.5, 6.5, ended_s=7.5))


def test_the_latest_of_many_attempts_are_reported():
    driver = Driver("p0", "d0", max_attempts=2 * MAX_STAYS)
    driver.ask()
    for number in range(MAX_STAYS + 3):
        driver.say("p0", GivenBack(f"r.{number}", "lease expired"), after_s=1)
    *_, end = driver.handle(ClientGone(RequestId("r")))
    assert len(end.timeline.stays) == MAX_STAYS
    assert end.timeline.stays[-1].placed_s == ROUTE_S + MAX_STAYS + 3


def test_a_request_that_ends_without_a_token_accounts_for_all_its_time():
    driver = Driver("p0", "d0")
    driver.ask()
    driver.say("p0", PrefillStarted("r.0", 0, LEASE), after_s=2)
    driver.now_s += 4
    *_, end = driver.handle(ClientGone(RequestId("r")))
    assert isinstance(end, Update)
    assert stages(end.timeline) == (ROUTE_S, 0, 2, 4)
    assert end.timeline.kv_wait_s is None


def test_a_request_that_was_never_placed_spent_its_time_in_the_queue():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1)
    driver.ask("a")
    driver.ask("b")
    driver.now_s += 4
    [end] = driver.handle(ClientGone(RequestId("b")))
    assert stages(end.timeline) == (ROUTE_S, 4, 0, 0)
    assert end.timeline.attempts == 0


NEWS = [
    ("d0", KvReady("r.0", 2, 0, "shm")),
    ("p0", PrefillDone("r.0", 9, None)),
    ("d0", DecodeStarted("r.0")),
]


@pytest.mark.parametrize("order", list(itertools.permutations(NEWS)), ids=lambda o: "")
@pytest.mark.parametrize("seen", [0, 1, 2, 3])
def test_stages_sum_for_any_order_and_any_missing_message(order, seen):
    """Messages of two workers arrive in any order. The times are chosen so that sums are exact."""
    rng = random.Random(seen)
    driver = Driver("p0", "d0")
    driver.ask(max_tokens=20)
    driver.say("p0", PrefillStarted("r.0", 0, LEASE), after_s=rng.randrange(8) / 4)
    first_s = None
    for number, (worker, message) in enumerate(order):
        if number == seen and not isinstance(message, PrefillDone):
            continue  # this message is missing
        effects = driver.say(worker, message, after_s=rng.randrange(8) / 4)
        if isinstance(message, PrefillDone):
            first_s = driver.now_s
            assert to_first(delivered(effects).timeline) == first_s - 10.0 + ROUTE_S
    timeline = delivered(
        driver.say("d0", Tokens("r.0", [8]), after_s=rng.randrange(8) / 4)
    ).timeline
    assert to_first(timeline) == first_s - 10.0 + ROUTE_S
    assert to_second(timeline) == driver.now_s - first_s
    parts = [timeline.kv_wait_s, timeline.decode_queue_s, timeline.first_step_s]
    assert min(*stages(timeline), *parts) >= 0


def test_transfer_times_stand_beside_the_stages_and_change_none():
    driver = Driver("p0", "d0")
    driver.ask()
    driver.say("p0", PrefillStarted("r.0", 0, LEASE), after_s=1)
    first = delivered(driver.say("p0", PrefillDone("r.0", 9, None), after_s=2))
    assert (first.timeline.kv_transfer_s, first.timeline.kv_exposed_s) == (None, None)
    driver.say("d0", KvReady("r.0", 2, 0, "shm", transfer_s=1.5, exposed_s=0.25), after_s=0.5)
    second = delivered(driver.say("d0", Tokens("r.0", [8]), after_s=1))
    assert (second.timeline.kv_transfer_s, second.timeline.kv_exposed_s) == (1.5, 0.25)
    assert to_second(second.timeline) == 1.5


def test_mixed_worker_has_no_transfer_times():
    driver = Driver("m0")
    driver.ask()
    driver.say("m0", PrefillStarted("r.0", 0, None))
    driver.say("m0", PrefillDone("r.0", 9, None))
    end = driver.say("m0", Tokens("r.0", [8], FinishReason.STOP))
    [timeline] = [e.timeline for e in end if isinstance(e, Update)]
    assert (timeline.kv_transfer_s, timeline.kv_exposed_s) == (None, None)


def running(driver, name="r", after_s=0.0) -> Timeline:
    driver.now_s += after_s
    return running_timeline(driver.machine.state.flights[name], driver.now_s)


def test_the_stage_of_a_request_that_runs_lasts_until_now():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1)
    driver.ask("a")
    driver.ask()
    assert stages(running(driver, after_s=2)) == (ROUTE_S, 2, 0, 0)
    driver.handle(ClientGone(RequestId("a")))
    assert stages(running(driver, after_s=4)) == (ROUTE_S, 2, 4, 0)
    driver.say("p0", PrefillStarted("r.0", 0, LEASE))
    assert stages(running(driver, after_s=8)) == (ROUTE_S, 2, 4, 8)
    driver.say("p0", PrefillDone("r.0", 9, None))
    line = running(driver, after_s=16)
    assert (stages(line), line.kv_wait_s, line.decode_queue_s) == ((ROUTE_S, 2, 4, 8), 16, 0)
    driver.say("d0", KvReady("r.0", 2, 0, "shm"))
    line = running(driver, after_s=32)
    assert (line.kv_wait_s, line.decode_queue_s, line.first_step_s) == (16, 32, 0)
    driver.say("d0", DecodeStarted("r.0"))
    line = running(driver, after_s=64)
    assert (line.kv_wait_s, line.decode_queue_s, line.first_step_s) == (16, 32, 64)
    update = delivered(driver.say("d0", Tokens("r.0", [8])))
    assert running(driver, after_s=1) == update.timeline


def test_a_request_that_waits_again_is_shown_as_waiting():
    driver = Driver("p0", "d0")
    driver.ask()
    driver.say("p0", PrefillStarted("r.0", 0, LEASE), after_s=1)
    driver.handle(WorkerLost("p0", "session ended"))
    assert stages(running(driver, after_s=2)) == (ROUTE_S, 3, 0, 0)
    driver.join("p0")
    assert stages(running(driver, after_s=4)) == (ROUTE_S, 3, 4, 0)


def test_hand_overs_and_moves_are_counted_by_pair():
    driver = Driver("p0", "d0")
    driver.ask()
    driver.say("p0", PrefillStarted("r.0", 0, LEASE))
    driver.say("d0", KvReady("r.0", 2, 0, "shm", transfer_s=0.5, exposed_s=0.25))
    [moved] = driver.machine.state.transfers.pairs
    assert (moved.source, moved.sink, moved.num_transfers) == ("p0", "d0", 1)
    assert moved.num_bytes == 2 * LAYOUT.block_bytes
    assert (moved.seconds, moved.exposed_s) == (0.5, 0.25)
