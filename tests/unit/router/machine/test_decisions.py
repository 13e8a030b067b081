"""The request machine with known costs: decisions, reasons, predicted lengths, fair order."""

import pytest

from engine.config import RouterConfig
from engine.demand import DecodeCost
from engine.messages import (
    Decode,
    DecodeStarted,
    FinishReason,
    Generate,
    KvReady,
    Limits,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Sampling,
    Tokens,
)
from engine.worker.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.worker.blocks import hash_blocks
from engine.worker.costs import CostErrors, PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.cluster.learning import ENOUGH
from router.machine.events import (
    Arrived,
    BlockEventsMissed,
    BlocksChanged,
    ClientGone,
    Tick,
    WorkerLost,
)
from router.machine.explaining import BURST, MOST_SHOWN
from router.machine.machine import RouterMachine
from router.machine.requests import Request, Update
from tests.kits.router.machine import LEASE, Driver, First, ends, sent

# prefill takes 10 ms per token, a step 10 ms plus 1 ms per sequence, a pull only its overhead
COSTS = WorkerCosts(PrefillCost(0.0, 0.01), DecodeCost(0.01, 0.001, 0.0), PullCost(0.0, 0.0, 1e12))
LONG = tuple(range(100))


class Predicting(Driver):
    """A driver of a machine that knows the costs of its workers."""

    def __init__(self, *workers: str, num_blocks: int = 100, **config) -> None:
        super().__init__()
        self.machine = RouterMachine(
            RouterConfig(**config), estimates=Estimates(COSTS), rng=First()
        )
        for name in workers:
            self.join(name, num_blocks)

    def request(self, name: str, prompt=LONG, max_tokens: int = 8, *, more_come=False, **fields):
        limits = Limits(max_len=len(prompt) + max_tokens)
        prompt = tuple(prompt)
        asked = Request(RequestId(name), prompt, Sampling(), limits, self.now_s, **fields)
        return self.handle(Arrived(asked, more_come))

    def holds(self, worker: str, token_ids) -> None:
        hashes = [bytes(h) for h in hash_blocks(token_ids, 4)]
        stored = BlockStored(hashes, None, [], 4, None, None, None)
        self.handle(BlocksChanged(worker, [AllBlocksCleared(), stored]))

    def answer(self, name: str, num_tokens: int) -> None:
        """Runs a placed request on p0 and d0 until its outcome."""
        self.say("p0", PrefillStarted(f"{name}.0", 0, LEASE))
        self.say("p0", PrefillDone(f"{name}.0", 9, None))
        self.say("d0", KvReady(f"{name}.0", 2, 0, "shm"))
        self.say("d0", DecodeStarted(f"{name}.0"))
        self.say("d0", Tokens(f"{name}.0", [1] * (num_tokens - 1), FinishReason.STOP))


# ---------------------------------------------------------------- reasons of decisions


def test_decision_has_reasons_and_predictions():
    driver = Predicting("p0", "p1", "d0")
    driver.holds("p1", LONG[:40])
    driver.request("r")
    driver.say("p1", PrefillStarted("r.0", 40, LEASE))
    effects = driver.say("p1", PrefillDone("r.0", 9, None))
    [decision] = [e.timeline.decision for e in effects if isinstance(e, Update)]
    assert (decision.policy, decision.why) == ("slo", "least TTFT")
    assert (decision.prefill_worker, decision.decode_worker) == ("p1", "d0")
    assert (decision.num_candidates, decision.num_matched_tokens) == (2, 40)
    assert decision.predicted_ttft_s == pytest.approx(0.6)
    assert decision.predicted_tpot_s == pytest.approx(0.011)
    assert (decision.pulled_from, decision.num_pulled_tokens) == (None, 0)
    assert driver.machine.counters["placed", "least TTFT"] == 1
    chosen, other = decision.candidates
    assert (chosen.worker_id, chosen.num_matched_tokens, chosen.wait_s) == ("p1", 40, 0)
    assert chosen.predicted_ttft_s == pytest.approx(decision.predicted_ttft_s)
    assert (other.worker_id, other.num_matched_tokens) == ("p0", 0)
    assert other.predicted_ttft_s >= chosen.predicted_ttft_s


def test_candidates_are_reported_for_a_bounded_share_of_the_decisions():
    driver = Predicting(*(f"{pool}{i}" for pool in "pd" for i in range(10)))
    for number in range(20):
        driver.request(f"r{number}")
    flights = driver.machine.state.flights.values()
    decisions = [flight.decision for flight in flights if flight.decision is not None]
    told = [decision for decision in decisions if decision.candidates]
    assert len(decisions) > len(told) == BURST
    for decision in told:
        first, *others = decision.candidates
        assert first.worker_id == decision.prefill_worker
        assert 0 < len(others) < MOST_SHOWN
        assert all(first.predicted_ttft_s <= each.predicted_ttft_s for each in others)


def test_pulled_prefix_is_among_the_reasons():
    driver = Predicting("p0", "d0")
    driver.holds("d0", LONG[:80])
    [(holder, _)] = sent(driver.request("r"), OfferPrefix)
    assert holder == "d0"
    decision = driver.machine.state.flights["r"].decision
    assert (decision.pulled_from, decision.num_pulled_tokens) == ("d0", 80)
    assert decision.predicted_ttft_s == pytest.approx(0.2 + 0.02)
    claim = driver.machine.view.workers["p0"].prefills["r.0"]
    assert claim.seconds == pytest.approx(0.2 + 0.02)


# ---------------------------------------------------------------- block events of workers


def test_block_events_replace_own_observations():
    driver = Predicting("p0", "d0")
    known = driver.machine.prefixes
    hashes = hash_blocks(LONG, 4)
    driver.holds("p0", LONG[:40])
    driver.request("r")
    driver.answer("r", 8)
    assert known.longest(hashes) == {"p0": 10, "d0": 25}  # p0 sent events; d0 has pulled
    driver.handle(BlocksChanged("p0", [BlockRemoved([hashes[5]], None)]))
    assert known.longest(hashes)["p0"] == 5
    driver.handle(BlockEventsMissed("p0", "silent"))
    assert "p0" not in known.longest(hashes)
    driver.handle(BlockEventsMissed("p0", "silent"))
    assert driver.machine.counters["blocks unheard", "silent"] == 1


def test_block_events_of_lost_workers_are_ignored():
    driver = Predicting("p0", "d0")
    driver.holds("p0", LONG)
    driver.handle(WorkerLost("p0", "gone"))
    driver.holds("p0", LONG)
    assert driver.machine.prefixes.longest(hash_blocks(LONG, 4)) == {}
    driver.join("p0")
    driver.request("r")
    driver.say("p0", PrefillStarted("r.0", 0, LEASE))
    driver.say("p0", PrefillDone("r.0", 9, None))
    assert driver.machine.prefixes.longest(hash_blocks(LONG, 4)) == {"p0": 25}


def test_forecast_includes_all_promises():
    driver = Predicting("p0", "d0", "m0")
    workers = driver.machine.view.workers

    def forecasts():
        return {name: driver.machine.forecast(w, driver.now_s) for name, w in workers.items()}

    empty = forecasts()
    assert (empty["p0"].wait_s, empty["p0"].tpot_s) == (0.0, None)
    assert (empty["d0"].wait_s, empty["d0"].tpot_s) == (None, pytest.approx(0.011))
    assert (empty["m0"].wait_s, empty["m0"].tpot_s) == (0.0, pytest.approx(0.011))
    for name in ("a", "b"):
        driver.request(name)
    driver.now_s += 0.25
    promised = forecasts()
    waits_s = [promised[name].wait_s for name in ("p0", "m0")]
    assert waits_s == [pytest.approx(0.75)] * 2
    assert promised["p0"].errors == CostErrors()
    unknown = Driver("m0").machine
    nothing = unknown.forecast(unknown.view.workers["m0"], 0.0)
    assert nothing.tpot_s is None


# ---------------------------------------------------------------- late binding


def counting_placements(driver: Predicting) -> list[float]:
    """Returns a list that collects the times of later attempts to place the queue's head."""
    placing = driver.machine._placing
    place_all, times_s = placing.place_all, []

    def counting(now_s):
        times_s.append(now_s)
        return place_all(now_s)

    placing.place_all = counting
    return times_s


def test_queue_is_tried_when_room_may_be_free_and_not_at_each_token():
    driver = Predicting("p0", "d0")
    driver.request("running", prompt=range(4))
    driver.say("p0", PrefillStarted("running.0", 0, LEASE))
    driver.say("p0", PrefillDone("running.0", 9, None))
    driver.say("d0", KvReady("running.0", 1, 0, "shm"))
    driver.request("a")  # one second of prefill
    driver.request("b")
    assert driver.machine.queue_len == 1
    looks = counting_placements(driver)
    driver.say("d0", Tokens("running.0", [1]))
    driver.holds("d0", LONG)
    driver.handle(BlockEventsMissed("d0", "silent"))
    assert looks == []
    driver.say("d0", Tokens("running.0", [1], FinishReason.STOP))
    driver.handle(Tick())
    assert len(looks) == 2


def test_prompt_is_placed_when_its_worker_is_predicted_to_be_nearly_done():
    driver = Predicting("p0", "d0")
    driver.request("a")  # one second of prefill
    driver.request("b")
    assert driver.machine.queue_len == 1
    # the prefill started half a second late
    driver.say("p0", PrefillStarted("a.0", 0, LEASE), after_s=0.5)
    wake_s = driver.machine.next_wake_s()
    assert wake_s == pytest.approx(driver.now_s + 0.95)
    driver.now_s = wake_s - 0.01
    assert not sent(driver.handle(Tick()), Prefill)
    driver.now_s = wake_s
    assert [m.seq_id for _, m in sent(driver.handle(Tick()), Prefill)] == ["b.0"]


def test_worker_with_a_late_prompt_gets_only_one_more():
    driver = Predicting("p0", "d0", num_blocks=1000)
    driver.request("a")
    driver.say("p0", PrefillStarted("a.0", 0, LEASE))
    driver.now_s += 9.0
    for name in "bcdef":
        driver.request(name)
    assert list(driver.machine.view.workers["p0"].prefills) == ["a.0", "b.0"]


# ---------------------------------------------------------------- predicted lengths


def learned(*workers: str, num_blocks: int = 100) -> Predicting:
    """Returns a driver that has seen answers of ten tokens with a limit of a hundred."""
    driver = Predicting(*workers, num_blocks=num_blocks)
    for number in range(ENOUGH):
        driver.request(f"old{number}", range(8), max_tokens=100)
        driver.answer(f"old{number}", 10)
        assert driver.machine.num_flights == 0
    return driver


def test_memory_is_reserved_for_predicted_lengths():
    driver = learned("p0", "d0", num_blocks=30)
    driver.request("a", range(8), max_tokens=100)
    claim = driver.machine.view.workers["d0"].decodes["a.0"]
    assert claim.blocks == 5  # for eighteen tokens; its limit would need 27 blocks


def test_reservation_grows_with_an_answer_longer_than_predicted():
    driver = learned("p0", "d0")
    driver.request("a", range(8), max_tokens=100)
    driver.say("p0", PrefillStarted("a.0", 0, LEASE))
    driver.say("p0", PrefillDone("a.0", 9, None))
    worker = driver.machine.view.workers["d0"]
    driver.say("d0", Tokens("a.0", [1] * 9))
    assert worker.decodes["a.0"].blocks == 5
    driver.say("d0", Tokens("a.0", [1]))
    assert worker.decodes["a.0"].blocks == 9  # for nineteen tokens plus sixteen more
    assert driver.machine.counters["answer", "longer than predicted"] == 1
    driver.say("d0", Tokens("a.0", [1] * 88))
    assert worker.decodes["a.0"].blocks == 27  # all blocks of its limit


# ---------------------------------------------------------------- fair order


def placed_in_turn(driver: Driver, number: int) -> list[str]:
    """Returns the requests in the order of placement; each prompt is computed at once."""
    order = []
    for _ in range(number):
        [seq_id] = driver.machine.view.workers["p0"].prefills
        order.append(seq_id.removesuffix(".0"))
        driver.say("p0", PrefillStarted(seq_id, 0, LEASE))
        driver.say("p0", PrefillDone(seq_id, 9, FinishReason.STOP))
    return order


def test_tenants_take_turns_and_urgent_requests_go_first():
    driver = Predicting("p0", "d0", num_blocks=10_000)
    driver.request("first", range(3000))
    for number in range(3):
        start = 10_000 * (number + 1)
        driver.request(f"many{number}", range(start, start + 4000), tenant="many")
    driver.request("few", range(50_000, 54_000), tenant="few")
    driver.request("urgent", range(60_000, 60_010), tenant="many", priority=-1)
    order = placed_in_turn(driver, 6)
    assert order == ["first", "urgent", "many0", "few", "many1", "many2"]


def test_cancelled_request_leaves_its_turn_to_others():
    driver = Predicting("p0", "d0")
    for name in "abc":
        driver.request(name)
    driver.handle(ClientGone(RequestId("b")))
    assert placed_in_turn(driver, 2) == ["a", "c"]
    assert driver.machine.state.waiting.queued_s == 0.0


def test_mixed_worker_computes_the_short_rest_of_its_prefix():
    driver = Predicting("p0", "m0")
    driver.holds("m0", LONG[:96])
    [(worker, _)] = sent(driver.request("r"), Generate)
    assert worker == "m0"


def test_decode_worker_is_chosen_by_its_pace():
    driver = Predicting("p0", "d0", "d1", prefill_backlog_s=100.0)
    for name in "abc":
        driver.request(name)
    decodes = []
    for name in "abc":
        effects = driver.say("p0", PrefillStarted(f"{name}.0", 0, LEASE))
        decodes += [worker for worker, _ in sent(effects, Decode)]
    assert set(decodes[:2]) == {"d0", "d1"}  # the third request may be placed on either
    assert not ends(driver.handle(Tick()))


def test_requests_that_come_together_are_placed_shortest_first():
    driver = Predicting("p0", "p1", "d0")
    for name, num_tokens in (("long", 90), ("short", 10)):
        assert driver.request(name, range(num_tokens), more_come=True) == []
    effects = driver.request("middle", range(50))
    prompts = [each.message.seq_id for each in effects if isinstance(each.message, Prefill)]
    assert prompts == ["short.0", "middle.0"]
    assert list(driver.machine.state.waiting.queue) == ["long"]


def test_of_requests_that_come_together_a_cached_one_counts_as_short():
    driver = Predicting("p0", "d0", queue_patience=1.0)
    driver.holds("d0", LONG)
    assert driver.request("long", range(200, 250), more_come=True) == []
    [first] = driver.request("cached", LONG)
    assert first.message.seq_id == "cached.0"
