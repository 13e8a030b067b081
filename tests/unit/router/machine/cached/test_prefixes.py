"""The request machine: prefixes that other workers hold, and KV that lost attempts left."""

import pytest

from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    Generate,
    GivenBack,
    KvReady,
    LeaseRef,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    RequestId,
    Tokens,
    TransferAddress,
)
from engine.worker.block_events import AllBlocksCleared
from engine.worker.blocks import hash_blocks
from router.machine.events import BlocksChanged, ClientGone, Tick, WorkerLost
from router.machine.requests import Finished
from tests.kits.fakes.block_events import stored
from tests.kits.router.machine import LAYOUT, LEASE, Driver, ends, sent

LONG = tuple(range(100))
OFFERED = LeaseRef("again.0.prefix", TransferAddress("p0", "inc", "tcp://x"), 24)


def block_hashes(token_ids):
    return hash_blocks(token_ids, LAYOUT.block_size)


def learned(*workers: str, **config) -> Driver:
    """Returns a driver that has observed slow prefill and fast pulls.

    The first prefill worker computed LONG and handed it over, and the answer finished.
    """
    driver = Driver(*workers, **config)
    driver.ask("first", LONG, max_tokens=8)
    prefill = next(w for w, a in driver.machine.view.workers.items() if a.prefills)
    decode = next(w for w, a in driver.machine.view.workers.items() if a.decodes)
    assert (prefill, decode) == ("p0", "d0")
    driver.say(prefill, PrefillStarted("first.0", 0, LEASE))
    driver.say(prefill, PrefillDone("first.0", 100, None), after_s=1.0)
    driver.say(decode, KvReady("first.0", 25, 0, "shm", transfer_s=0.001))
    driver.say(decode, DecodeStarted("first.0"))
    driver.say(decode, Tokens("first.0", [101, 102], FinishReason.STOP))
    return driver


@pytest.fixture
def driver() -> Driver:
    """`p0` and `d0` hold LONG. A long backlog keeps the next prompts away from `p0`."""
    driver = learned("p0", "p1", "d0")
    driver.ask("backlog", range(500, 540))
    return driver


def test_a_prompt_that_another_worker_holds_is_offered_before_it_is_computed(driver):
    effects = driver.ask("again", (*LONG, 7, 8))
    assert not sent(effects, Prefill)
    [(holder, offer)] = sent(effects, OfferPrefix)
    assert (holder, offer) == ("d0", OfferPrefix("again.0", [*LONG, 7, 8]))
    effects = driver.say("d0", PrefixOffered("again.0", OFFERED))
    [(worker, prefill)] = sent(effects, Prefill)
    assert (worker, prefill.prefix, prefill.token_ids) == ("p1", OFFERED, [*LONG, 7, 8])


def test_one_of_two_workers_keeps_a_prompt():
    driver, kept = Driver("p0", "d0"), []
    for number in range(8):
        name = f"r{number}"
        effects = driver.ask(name, range(1000 * number, 1000 * number + 100), max_tokens=8)
        [(_, prompt)] = sent(effects, Prefill)
        effects = driver.say("p0", PrefillStarted(f"{name}.0", 0, LEASE))
        [(_, decode)] = sent(effects, Decode)
        assert prompt.evict_first != decode.evict_first
        kept.append("d0" if prompt.evict_first else "p0")
        driver.say("p0", PrefillDone(f"{name}.0", 100, None), after_s=0.1)
        driver.say("d0", KvReady(f"{name}.0", 25, 0, "shm", transfer_s=0.001))
        driver.say("d0", DecodeStarted(f"{name}.0"))
        driver.say("d0", Tokens(f"{name}.0", [101, 102], FinishReason.STOP))
    assert set(kept) == {"p0", "d0"}


def test_both_workers_learn_that_a_prompt_is_likely_reused(monkeypatch):
    driver, noted = Driver("p0", "d0"), []

    def record(hashes):
        noted.append(len(hashes))
        return len(hashes) > 1

    monkeypatch.setattr(driver.machine.state.conversations, "record", record)
    for name, num_tokens in (("short", 5), ("long", 9)):
        [(_, prompt)] = sent(driver.ask(name, range(num_tokens), max_tokens=8), Prefill)
        [(_, decode)] = sent(driver.say("p0", PrefillStarted(f"{name}.0", 0, LEASE)), Decode)
        assert prompt.likely_reused == decode.likely_reused == (name == "long")
    assert noted == [1, 2]


def test_a_prompt_for_one_token_is_kept_where_it_is_computed():
    driver = Driver("p0", "d0")
    for number in range(4):
        effects = driver.ask(f"r{number}", range(1000 * number, 1000 * number + 9), max_tokens=1)
        prompts = [prompt for _, prompt in sent(effects, Prefill)]
        assert not any(prompt.evict_first for prompt in prompts)


def test_a_holder_that_does_not_keep_a_prompt_offers_spare_blocks():
    driver = learned("p0", "p1", "d0", "d1")
    driver.ask("backlog", range(500, 540))
    effects = driver.ask("again", (*LONG, 7, 8))
    [(holder, offer)] = sent(effects, OfferPrefix)
    attempt = driver.machine.state.flights["again"].attempt
    assert offer.evict_first == (attempt.kept_by != holder)


def test_a_prompt_that_is_not_handed_over_is_kept_where_it_is_pulled_to(driver):
    effects = driver.ask("again", (*LONG, 7, 8), max_tokens=1)
    [(holder, offer)] = sent(effects, OfferPrefix)
    assert (holder, offer.evict_first) == ("d0", True)


def test_a_decode_worker_holds_its_answers_except_the_last_token():
    driver = learned("p0", "d0")  # d0 answered LONG with 100, 101, 102
    driver.ask("next", (*LONG, 200), max_tokens=8)
    driver.say("p0", PrefillStarted("next.0", 100, LEASE))
    driver.say("p0", PrefillDone("next.0", 201, None))
    driver.say("d0", KvReady("next.0", 1, 25, "shm"))
    driver.say("d0", Tokens("next.0", [202, 203, 204], FinishReason.STOP))
    known = driver.machine.prefixes
    assert known.longest(block_hashes([*LONG, 200, 201, 202, 203])) == {"p0": 25, "d0": 26}
    assert known.longest(block_hashes([*LONG, 100, 101, 102, 103])) == {"p0": 25, "d0": 25}


def test_a_worker_that_holds_as_much_computes_without_asking():
    driver = learned("p0", "d0")
    effects = driver.ask("again", (*LONG, 7, 8))
    assert [w for w, _ in sent(effects, Prefill)] == ["p0"]
    assert not sent(effects, OfferPrefix)


def test_prefix_is_computed_if_pulling_is_slower(driver):
    effects = driver.ask("short", (*LONG[:4], 7))  # computing takes 40 ms at most
    assert sent(effects, OfferPrefix)
    quick = Driver("p0", "p1", "d0")
    quick.ask("first", LONG)
    quick.say("p0", PrefillStarted("first.0", 0, LEASE))
    quick.say("p0", PrefillDone("first.0", 100, None), after_s=0.001)
    quick.say("d0", KvReady("first.0", 25, 0, "shm", transfer_s=0.001))
    quick.ask("backlog", range(500, 540))
    assert sent(quick.ask("again", (*LONG, 7)), Prefill)


def test_mixed_worker_pulls_a_prefix_too():
    driver = learned("p0", "d0")
    driver.ask("backlog", range(500, 540))
    driver.join("m0")
    [(holder, _)] = sent(driver.ask("again", (*LONG, 7)), OfferPrefix)
    [(worker, generate)] = sent(driver.say(holder, PrefixOffered("again.0", OFFERED)), Generate)
    assert (worker, generate.prefix) == ("m0", OFFERED)


# ---------------------------------------------------------------- offers that fail


def test_empty_offer_leads_to_full_prefill_and_is_not_repeated(driver):
    driver.ask("again", (*LONG, 7))
    [(worker, prefill)] = sent(driver.say("d0", PrefixOffered("again.0", None)), Prefill)
    assert (worker, prefill.prefix) == ("p1", None)
    assert driver.machine.counters["fallback", "prefix not held"] == 1
    driver.handle(ClientGone(RequestId("again")))
    [(holder, _)] = sent(driver.ask("third", (*LONG, 7)), OfferPrefix)
    assert holder == "p0"


def test_blocks_stored_after_a_crossing_answer_are_kept(driver):
    told = [AllBlocksCleared(), stored(block_hashes(LONG), None, block_size=4)]
    driver.handle(BlocksChanged("d0", told))
    driver.ask("again", (*LONG, 7))
    driver.say("d0", PrefixOffered("again.0", None))
    assert driver.machine.prefixes.longest(block_hashes(LONG))["d0"] == 25


def test_an_offer_that_comes_too_late_is_ended_and_ignored(driver):
    driver.ask("again", (*LONG, 7))
    due_s = driver.machine.next_wake_s()
    assert due_s == driver.now_s + 1.0
    driver.now_s = due_s
    effects = driver.handle(Tick())
    assert sent(effects, Cancel) == [("d0", Cancel("again.0"))]
    [(worker, prefill)] = sent(effects, Prefill)
    assert (worker, prefill.prefix) == ("p1", None)
    assert driver.machine.counters["fallback", "prefix offer late"] == 1
    assert driver.say("d0", PrefixOffered("again.0", OFFERED)) == []
    assert driver.machine.next_wake_s() > driver.now_s


def test_an_offer_of_a_worker_that_was_not_asked_is_ignored(driver):
    driver.ask("again", (*LONG, 7))
    assert driver.say("p0", PrefixOffered("again.0", OFFERED)) == []
    assert sent(driver.say("d0", PrefixOffered("again.0", OFFERED)), Prefill)
    assert driver.say("d0", PrefixOffered("again.0", OFFERED)) == []


def test_holder_lost_before_its_offer_costs_only_the_prefix():
    driver = learned("p0", "p1", "d0", "d1")
    driver.machine.prefixes.retract("d0", block_hashes(LONG))
    driver.ask("backlog", range(500, 540))
    [(holder, _)] = sent(driver.ask("again", (*LONG, 7)), OfferPrefix)
    assert holder == "p0"
    effects = driver.handle(WorkerLost("p0", "gone"))
    assert ("p1", "again.0", None) in [(w, m.seq_id, m.prefix) for w, m in sent(effects, Prefill)]
    assert driver.machine.counters["fallback", "prefix holder lost"] == 1
    # only the request `backlog` is retried
    assert driver.machine.counters["retried", "worker lost"] == 1


def test_holder_lost_after_its_offer_is_left_to_the_prefill_worker():
    driver = learned("p0", "p1", "d0", "d1")
    driver.machine.prefixes.retract("d0", block_hashes(LONG))
    driver.ask("backlog", range(500, 540))
    driver.ask("again", (*LONG, 7))
    driver.say("p0", PrefixOffered("again.0", OFFERED))
    effects = driver.handle(WorkerLost("p0", "gone"))
    assert "again.0" not in [m.seq_id for _, m in sent(effects, Cancel)]
    driver.say("p1", PrefillStarted("again.0", 0, LEASE))


@pytest.mark.parametrize("has_offered", [False, True])
@pytest.mark.parametrize("end", ["client gone", "prefill lost", "given back", "no news"])
def test_an_attempt_that_ends_while_its_offer_may_be_open_ends_the_offer(has_offered, end):
    driver = learned("p0", "p1", "d0", "d1")
    driver.machine.prefixes.retract("d0", block_hashes(LONG))
    driver.ask("backlog", range(500, 540))
    driver.ask("again", (*LONG, 7))
    if has_offered:
        driver.say("p0", PrefixOffered("again.0", OFFERED))
    match end:
        case "client gone":
            effects = driver.handle(ClientGone(RequestId("again")))
        case "prefill lost":
            effects = driver.handle(WorkerLost("p1", "gone"))
        case "given back":
            effects = driver.say("p1", GivenBack("again.0", "why"))
        case "no news":
            driver.now_s += 1000
            effects = driver.handle(Tick())
    assert ("p0", Cancel("again.0")) in sent(effects, Cancel)


def test_an_offer_is_over_when_its_prompt_is_computed():
    driver = learned("p0", "p1", "d0", "d1")
    driver.machine.prefixes.retract("d0", block_hashes(LONG))
    driver.ask("backlog", range(500, 540))
    driver.ask("again", (*LONG, 7))
    driver.say("p0", PrefixOffered("again.0", OFFERED))
    driver.say("p1", PrefillStarted("again.0", 96, LEASE))
    effects = driver.handle(ClientGone(RequestId("again")))
    assert "p0" not in [worker for worker, _ in sent(effects, Cancel)]


# ---------------------------------------------------------------- KV that a lost attempt left


def test_a_request_returns_to_the_worker_where_its_blocks_are():
    driver = Driver("p0", "p1", "d0", "d1")
    driver.ask("r", LONG)
    driver.say("p0", PrefillStarted("r.0", 0, LEASE))
    driver.say("p0", PrefillDone("r.0", 9, None))
    effects = driver.say("d0", GivenBack("r.0", "pull failed: why", num_kept_tokens=40))
    ((prefill, message),) = sent(effects, Prefill)
    assert (prefill, message.seq_id) == ("p1", "r.1")  # only the pull from p0 failed
    assert set(driver.machine.view.workers["d0"].decodes) == {"r.1"}
    assert driver.machine.prefixes.longest(block_hashes(LONG))["d0"] == 10
    driver.handle(WorkerLost("d0", "gone"))
    driver.join("d0")
    assert set(driver.machine.view.workers["d1"].decodes) == {"r.2"}


def test_an_answer_of_one_token_leaves_nothing_at_the_decode_worker():
    driver = Driver("p0", "d0")
    driver.ask("r", LONG, max_tokens=1)
    driver.say("p0", PrefillStarted("r.0", 0, None))
    driver.say("p0", PrefillDone("r.0", 9, FinishReason.LENGTH))
    assert driver.machine.prefixes.longest(block_hashes(LONG)) == {"p0": 25}


def test_blocks_of_a_lost_worker_are_forgotten():
    driver = learned("p0", "p1", "d0")
    driver.handle(WorkerLost("d0", "gone"))
    driver.join("d0")
    assert driver.machine.prefixes.longest(block_hashes(LONG)) == {"p0": 25}


def test_single_worker_needs_no_hashes(monkeypatch):
    def never(*args):
        raise AssertionError("hashed for nothing")

    monkeypatch.setattr("router.machine.requests.hash_blocks", never)
    driver = Driver("m0")
    driver.ask("r", LONG)
    driver.say("m0", PrefillStarted("r.0", 0, None))
    driver.say("m0", PrefillDone("r.0", 9, None))
    effects = driver.say("m0", Tokens("r.0", [8], FinishReason.STOP))
    assert ends(effects) == [Finished(FinishReason.STOP)]
