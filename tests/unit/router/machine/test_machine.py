"""The request machine, event by event."""

import pytest

from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    Generate,
    KvReady,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Tokens,
)
from router.machine.events import ClientGone, Tick
from router.machine.requests import Cancelled, Failed, Finished, Rejected, Update
from tests.kits.router.machine import LEASE, Driver, ends, sent


@pytest.fixture
def pair() -> Driver:
    return Driver("p0", "d0")


def test_a_request_is_prefilled_at_once_and_reserves_on_both_workers(pair):
    [(worker, message)] = sent(pair.ask(), Prefill)
    assert worker == "p0"
    assert message.token_ids == [1, 2, 3, 4, 5]
    assert pair.machine.view.workers["p0"].reserved_tokens == 5
    assert pair.machine.view.workers["d0"].reserved_blocks == 3  # nine tokens in blocks of four


def test_decode_worker_gets_the_lease_then_the_first_token(pair):
    pair.ask()
    [(worker, decode)] = sent(pair.say("p0", PrefillStarted("r.0", 4, LEASE)), Decode)
    assert (worker, decode.lease, decode.token_ids) == ("d0", LEASE, [1, 2, 3, 4, 5])
    effects = pair.say("p0", PrefillDone("r.0", 9, None))
    assert sent(effects, FirstToken) == [("d0", FirstToken("r.0", 9))]
    assert [e.token_ids for e in effects if isinstance(e, Update)] == [(9,)]
    assert pair.machine.view.workers["p0"].reserved_tokens == 0


def test_last_token_ends_the_request_and_returns_its_claims(pair):
    pair.ask()
    pair.hand_over()
    pair.say("d0", Tokens("r.0", [8]))
    effects = pair.say("d0", Tokens("r.0", [7], FinishReason.LENGTH))
    assert ends(effects) == [Finished(FinishReason.LENGTH)]
    assert not sent(effects, Cancel)
    assert pair.machine.view.workers["d0"].reserved_blocks == 0
    assert pair.machine.num_flights == 0


def test_workers_are_told_the_clients_id_of_a_request(pair):
    [(_, prefill)] = sent(pair.ask(client_id="mine"), Prefill)
    [(_, decode)] = sent(pair.say("p0", PrefillStarted("r.0", 0, LEASE)), Decode)
    assert (prefill.client_id, decode.client_id) == ("mine", "mine")


def test_the_longest_request_counts_its_prompt_and_its_answer_so_far(pair):
    assert pair.machine.longest_len == 0
    pair.ask()
    pair.ask("longer", prompt=(1,) * 6)
    assert pair.machine.longest_len == 6
    pair.hand_over()
    pair.say("d0", Tokens("r.0", [8]))
    assert pair.machine.longest_len == 7
    pair.say("d0", Tokens("r.0", [7, 6], FinishReason.LENGTH))
    assert pair.machine.longest_len == 6


def test_an_answer_that_ends_with_its_first_token_cancels_the_waiting_decode(pair):
    pair.ask()
    pair.say("p0", PrefillStarted("r.0", 0, LEASE))
    effects = pair.say("p0", PrefillDone("r.0", 9, FinishReason.STOP))
    assert ends(effects) == [Finished(FinishReason.STOP)]
    assert ("d0", Cancel("r.0")) in sent(effects, Cancel)
    assert not sent(effects, FirstToken)


def test_the_stages_sum_to_the_first_token_and_to_the_gap_after_it(pair):
    pair.ask()  # submits a request that was received half a second ago
    pair.say("p0", PrefillStarted("r.0", 4, LEASE), after_s=1)
    pair.say("p0", PrefillDone("r.0", 9, None), after_s=2)
    pair.say("d0", KvReady("r.0", 1, 1, "shm"), after_s=4)
    pair.say("d0", DecodeStarted("r.0"), after_s=8)
    pair.say("d0", Tokens("r.0", [8]), after_s=16)
    [end] = [
        e
        for e in pair.say("d0", Tokens("r.0", [7], FinishReason.LENGTH), after_s=32)
        if isinstance(e, Update)
    ]
    t = end.timeline
    assert (t.route_s, t.queue_s, t.prefill_queue_s, t.prefill_compute_s) == (0.5, 0, 1, 2)
    assert (t.kv_wait_s, t.decode_queue_s, t.first_step_s) == (4, 8, 16)
    assert t.num_cached_tokens == 4


def test_kv_that_was_there_before_the_first_token_waits_no_time(pair):
    pair.ask()
    pair.say("p0", PrefillStarted("r.0", 0, LEASE), after_s=1)
    pair.say("d0", KvReady("r.0", 2, 0, "shm"), after_s=1)
    pair.say("p0", PrefillDone("r.0", 9, None), after_s=1)
    [update] = [e for e in pair.say("d0", Tokens("r.0", [8]), after_s=3) if isinstance(e, Update)]
    assert update.timeline.kv_wait_s == 0
    assert update.timeline.decode_queue_s + update.timeline.first_step_s == 3


def test_mixed_worker_generates_alone():
    driver = Driver("m0")
    [(worker, message)] = sent(driver.ask(), Generate)
    assert worker == "m0"
    driver.say("m0", PrefillStarted("r.0", 0, None))
    effects = driver.say("m0", PrefillDone("r.0", 9, None))
    assert not sent(effects, FirstToken)
    assert message.limits.max_len == 9


def test_work_goes_to_the_least_loaded_workers():
    driver = Driver("p0", "p1", "d0", "d1")
    first = sent(driver.ask("a"), Prefill)[0][0]
    second = sent(driver.ask("b"), Prefill)[0][0]
    assert {first, second} == {"p0", "p1"}
    assert {w.reserved_blocks for i, w in driver.machine.view.workers.items() if i[0] == "d"} == {3}


def test_a_prompt_waits_in_the_router_while_the_backlog_is_long():
    driver = Driver("p0", "d0", prefill_backlog_tokens=8)
    driver.ask("a")
    assert not sent(driver.ask("b"), Prefill)
    assert driver.machine.queue_len == 1
    driver.say("p0", PrefillStarted("a.0", 0, LEASE))
    effects = driver.say("p0", PrefillDone("a.0", 9, None))
    assert sent(effects, Prefill)[0][1].seq_id == "b.0"


@pytest.mark.parametrize("alive", [[], ["p0"], ["d0"]])
def test_request_waits_for_a_worker_of_each_role(alive):
    driver = Driver(*alive)
    assert driver.ask() == []
    driver.now_s += 61
    [outcome] = ends(driver.handle(Tick()))
    assert isinstance(outcome, Rejected)
    assert "worker came in time" in outcome.message


def test_a_request_goes_on_when_the_missing_worker_comes():
    driver = Driver("p0")
    assert driver.ask() == []
    effects = driver.join("d0")
    assert [worker for worker, _ in sent(effects, Prefill)] == ["p0"]


def test_a_request_larger_than_any_kv_memory_fails_at_once():
    driver = Driver("p0", "d0", num_blocks=2)
    [outcome] = ends(driver.ask())
    assert isinstance(outcome, Failed)
    assert "KV memory" in outcome.message


def test_cancelled_request_leaves_the_queue():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1)
    driver.ask("a")
    driver.ask("b")
    assert ends(driver.handle(ClientGone(RequestId("b")))) == [Cancelled()]
    assert driver.machine.queue_len == 0


def test_wait_in_the_queue_is_bounded():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1, queue_timeout_s=5)
    driver.ask("a")
    driver.ask("b")
    driver.now_s = driver.machine.next_wake_s()
    [outcome] = ends(driver.handle(Tick()))
    assert isinstance(outcome, Rejected)
