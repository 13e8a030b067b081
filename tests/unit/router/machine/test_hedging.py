"""Prompts that take too long are computed a second time elsewhere; the first to finish
continues."""

import pytest

from engine.config import RouterConfig
from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    GivenBack,
    KvReady,
    Prefill,
    PrefillDone,
    PrefillStarted,
    Role,
    RoleChanged,
    Tokens,
)
from engine.worker.costs import DecodeCost, PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.events import ClientGone, Tick, WorkerLost
from router.machine.hedging import AGAIN_S, HEDGE_BURST, HEDGE_SHARE
from router.machine.machine import RouterMachine
from router.machine.placing import HEDGE_LEAST_S
from router.machine.requests import Cancelled, Finished, Update
from tests.kits.router.machine import LEASE, Driver, First, ends, sent

COSTS = WorkerCosts(
    prefill=PrefillCost(0.0, 0.1), decode=DecodeCost(0.01, 0.0, 0.0), pull=PullCost(0.0, 0.0, 1e9)
)
FOUR = ("p0", "p1", "d0", "d1")
PREDICTED_S = 0.5  # five tokens at the known cost


def cluster(*workers: str, **config) -> Driver:
    """Returns a driver with workers of known costs."""
    driver = Driver(**config)
    driver.machine = RouterMachine(RouterConfig(**config), rng=First(), estimates=Estimates(COSTS))
    for name in workers or FOUR:
        driver.join(name)
    return driver


def tick(driver: Driver, after_s: float):
    driver.now_s += after_s
    return driver.handle(Tick())


def hedged(driver: Driver) -> tuple[str, str]:
    """Submits `r`, and advances the time until `r` is hedged. Returns both prefill workers."""
    [(first, _)] = sent(driver.ask(), Prefill)
    [(second, prefill)] = sent(tick(driver, 3 * PREDICTED_S), Prefill)
    assert prefill.seq_id == "r.1"
    assert first != second
    return first, second


def counted(driver: Driver) -> dict[str, int]:
    return {reason: n for (name, reason), n in driver.machine.counters.items() if name == "hedge"}


def is_clear(driver: Driver) -> bool:
    workers = driver.machine.view.workers.values()
    return driver.machine.num_flights == 0 and not any(
        w.reserved_tokens or w.reserved_blocks or w.prefills or w.decodes for w in workers
    )


def test_prompt_is_hedged_after_a_multiple_of_its_prediction():
    driver = cluster()
    [(first, _)] = sent(driver.ask(), Prefill)
    assert driver.machine.next_wake_s() == pytest.approx(driver.now_s + 3 * PREDICTED_S)
    assert tick(driver, 3 * PREDICTED_S - 0.01) == []
    [(second, again)] = sent(tick(driver, 0.01), Prefill)
    assert (first, second) == ("p0", "p1")
    assert (again.seq_id, again.token_ids, again.prefix) == ("r.1", [1, 2, 3, 4, 5], None)
    workers = driver.machine.view.workers
    assert workers["p0"].reserved_tokens == workers["p1"].reserved_tokens == 5
    assert sum(worker.reserved_blocks for worker in workers.values()) == 2 * 3
    assert counted(driver) == {"begun": 1}


def test_no_hedge_within_a_second():
    driver = cluster()
    driver.ask(prompt=(1,))
    assert driver.machine.next_wake_s() == driver.now_s + HEDGE_LEAST_S


def finish(driver: Driver, seq: str, decode: str) -> None:
    driver.say(decode, KvReady(seq, 2, 0, "shm"))
    driver.say(decode, DecodeStarted(seq))
    effects = driver.say(decode, Tokens(seq, [8, 7, 6], FinishReason.LENGTH))
    assert ends(effects) == [Finished(FinishReason.LENGTH)]
    assert is_clear(driver)


@pytest.mark.parametrize("winner", [0, 1])
def test_attempt_with_the_first_token_goes_on_and_the_other_is_cancelled(winner):
    driver = cluster()
    workers = hedged(driver)
    flight = driver.machine.state.flights["r"]
    decoders = [attempt.decode for attempt in flight.attempts]
    for i, worker in enumerate(workers):
        [(decode, message)] = sent(driver.say(worker, PrefillStarted(f"r.{i}", 0, LEASE)), Decode)
        assert (decode, message.seq_id) == (decoders[i], f"r.{i}")
    loser = 1 - winner
    effects = driver.say(workers[winner], PrefillDone(f"r.{winner}", 9, None))
    assert sent(effects, Cancel) == [
        (workers[loser], Cancel(f"r.{loser}")),
        (decoders[loser], Cancel(f"r.{loser}")),
    ]
    assert sent(effects, FirstToken) == [(decoders[winner], FirstToken(f"r.{winner}", 9))]
    [deliver] = [effect for effect in effects if isinstance(effect, Update)]
    assert deliver.token_ids == (9,)
    assert deliver.timeline.prefill_worker == workers[winner]
    assert deliver.timeline.attempts == 1
    assert counted(driver) == {"begun": 1, "won" if winner else "lost": 1}
    assert driver.say(workers[loser], PrefillDone(f"r.{loser}", 9, None)) == []
    finish(driver, f"r.{winner}", decoders[winner])


def test_a_request_is_hedged_once():
    driver = cluster(*FOUR, "p2")
    hedged(driver)
    assert tick(driver, 20.0) == []
    driver.say("p0", GivenBack("r.0", "no room"))
    effects = driver.say("p1", GivenBack("r.1", "no room"))
    [(_, again)] = sent(effects, Prefill)
    assert again.seq_id == "r.2"
    assert tick(driver, 20.0) == []


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("by", ["worker", "word", "role"])
def test_request_goes_on_as_one_attempt_if_the_other_fails(lost, by):
    driver = cluster()
    workers = hedged(driver)
    other = 1 - lost
    if by == "worker":
        effects = driver.handle(WorkerLost(workers[lost], "gone"))
    elif by == "word":
        effects = driver.say(workers[lost], GivenBack(f"r.{lost}", "no room"))
    else:
        driver.say(workers[lost], RoleChanged(Role.DRAINED))
        effects = driver.say(workers[lost], GivenBack(f"r.{lost}", "role changed"))
    assert not ends(effects)
    assert not sent(effects, Prefill)
    assert Cancel(f"r.{lost}") in [message for _, message in sent(effects, Cancel)]
    assert driver.machine.counters["retried", "worker lost"] == 0
    driver.say(workers[other], PrefillStarted(f"r.{other}", 0, LEASE))
    driver.say(workers[other], PrefillDone(f"r.{other}", 9, None))
    attempt = driver.machine.state.flights["r"].attempt
    finish(driver, f"r.{other}", attempt.decode)


def test_both_lost_at_once_are_one_failed_attempt():
    driver = cluster(*FOUR, "p2", max_attempts=2)
    first, second = hedged(driver)
    driver.handle(WorkerLost(first, "gone"))
    [(worker, again)] = sent(driver.handle(WorkerLost(second, "gone")), Prefill)
    assert ({first, second, worker}, again.seq_id) == ({"p0", "p1", "p2"}, "r.2")


def test_cancel_ends_both_attempts():
    driver = cluster()
    hedged(driver)
    effects = driver.handle(ClientGone("r"))
    assert {message.seq_id for _, message in sent(effects, Cancel)} == {"r.0", "r.1"}
    assert ends(effects) == [Cancelled()]
    assert is_clear(driver)


def test_two_attempts_without_messages_in_time_are_both_ended():
    driver = cluster(progress_timeout_s=7.0, slowest_prefill_tokens_per_s=10.0)
    hedged(driver)
    effects = tick(driver, 7.5)
    assert {message.seq_id for _, message in sent(effects, Cancel)} == {"r.0", "r.1"}
    [(_, again)] = sent(effects, Prefill)
    assert again.seq_id == "r.2"


def test_hedge_without_room_is_tried_again():
    driver = cluster("p0", "d0")
    driver.ask()
    assert tick(driver, 3 * PREDICTED_S) == []
    assert driver.machine.next_wake_s() == driver.now_s + AGAIN_S
    driver.join("p1")
    assert sent(tick(driver, AGAIN_S), Prefill)


@pytest.mark.parametrize(
    "driver",
    [cluster(hedge_after=None), Driver(*FOUR), cluster("m0", "p0", hedge_after=1e9)],
    ids=["not wanted", "nothing predicted", "for ages"],
)
def test_no_hedge(driver):
    driver.ask()
    assert tick(driver, 30.0) == []


def test_mixed_workers_stand_in_for_each_other():
    driver = cluster("m0", "m1")
    driver.ask()
    tick(driver, 3 * PREDICTED_S)
    workers = driver.machine.view.workers
    assert [list(workers[name].decodes) for name in ("m0", "m1")] == [["r.0"], ["r.1"]]


def test_second_attempts_are_a_bounded_share():
    driver = cluster(*FOUR, max_queue=1000)
    num_placed = 0
    for i in range(400):
        [(worker, prefill)] = sent(driver.ask(f"r{i}"), Prefill)
        num_placed += 1
        tick(driver, 3 * PREDICTED_S)
        begun = counted(driver).get("begun", 0)
        assert begun <= HEDGE_BURST + HEDGE_SHARE * num_placed
        driver.say(worker, PrefillStarted(prefill.seq_id, 0, None))
        driver.say(worker, PrefillDone(prefill.seq_id, 9, FinishReason.LENGTH))
    assert begun >= HEDGE_SHARE * num_placed
    assert is_clear(driver)
