"""One API key cannot keep another key out of the queue or off the workers."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    DecodeStarted,
    FinishReason,
    Generate,
    KvReady,
    Limits,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Role,
    Sampling,
    Tokens,
    Welcome,
)
from router.machine.events import Arrived, SendTo, Tick, WorkerJoined
from router.machine.rebalance import LOOK_EVERY_S
from router.machine.requests import Rejected, Request, Update
from tests.kits.router.machine import LAYOUT, LEASE, Driver, ends, sent, updates

TURN_AFTER_S = 1.0


class Keys(Driver):
    """A driver whose requests have API keys. The driver also plays the workers."""

    def handle(self, event):
        """Handles an event. Checks the slow invariants only at some events."""
        self.num_events = getattr(self, "num_events", 0) + 1
        effects = self.machine.handle(event, self.now_s)
        if self.num_events % 50 == 0 or isinstance(event, Tick):
            self.machine.validate()
        return effects

    def join(
        self,
        name: str,
        num_blocks: int = 100,
        max_running: int = 64,
        *,
        stretch: float | None = None,
    ):
        role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]]
        info = Welcome(PROTOCOL_VERSION, name, "inc", role, "fp", LAYOUT, num_blocks, max_running)
        return self.handle(WorkerJoined(msgspec.structs.replace(info, stretch=stretch)))

    def ask_as(self, key, name, *, num_prompt=5, max_tokens=4, has_key=True, priority=0):
        request = Request(
            RequestId(name),
            tuple(range(1, num_prompt + 1)),
            Sampling(),
            Limits(max_len=num_prompt + max_tokens),
            self.now_s,
            tenant=key,
            has_key=has_key,
            priority=priority,
        )
        return self.handle(Arrived(request))

    def run_all(self, effects):
        """Completes all prompts in the effects, so that their sequences decode."""
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            if not isinstance(effect, SendTo) or not isinstance(effect.message, Prefill | Generate):
                continue
            seq_id = effect.message.seq_id
            attempt = self.attempt_of(seq_id)
            if attempt is None:
                continue
            hands_over = attempt.hands_over
            waiting += self.say(effect.worker_id, PrefillStarted(seq_id, 0, LEASE))
            waiting += self.say(effect.worker_id, PrefillDone(seq_id, 9, None))
            if hands_over:
                waiting += self.say(attempt.decode, KvReady(seq_id, 2, 0, "shm"))
                waiting += self.say(attempt.decode, DecodeStarted(seq_id))

    def attempt_of(self, seq_id):
        flight = self.machine.state.by_seq.get(seq_id)
        return None if flight is None else flight.attempt

    def tick_until_due(self):
        """Sends a tick at the machine's next deadline."""
        wake_s = self.machine.next_wake_s()
        assert wake_s is not None
        self.now_s = max(self.now_s, wake_s)
        return self.handle(Tick())

    def running(self, key):
        flights = self.machine.state.flights.values()
        return [f for f in flights if f.request.tenant == key and f.attempt is not None]


def filled(num_streams: int = 200, *, stretch: float | None = None, **config) -> Keys:
    """Returns a driver in which one key fills the only decode worker, with more requests queued."""
    driver = Keys(prefill_backlog_tokens=10_000, **config)
    driver.join("p0", stretch=stretch)
    driver.join("d0", num_blocks=100_000, max_running=64, stretch=stretch)
    for number in range(num_streams):
        driver.run_all(driver.ask_as("a", f"a{number}", max_tokens=1000))
    assert len(driver.running("a")) == 64
    return driver


# The prefill worker is fluid and could decode, but the policy does not place decodes on it.
@pytest.mark.parametrize("stretch", [None, 4.0], ids=["walls", "fluid"])
def test_a_key_waits_no_longer_than_its_turn_behind_200_streams_of_another(stretch):
    driver = filled(stretch=stretch)
    asked_s = driver.now_s
    assert not sent(driver.ask_as("b", "b0"), Prefill)
    effects = []
    while not driver.running("b"):
        effects = driver.tick_until_due()
        assert driver.now_s <= asked_s + TURN_AFTER_S + LOOK_EVERY_S
    [(_, message)] = sent(effects, Prefill)
    assert message.seq_id == "b0.0"
    assert {m.seq_id for _, m in sent(effects, Cancel)} == {"a63.0"}  # the youngest running request
    assert len(driver.running("a")) == 63
    assert driver.machine.counters["retried", "another key's turn"] == 1


def test_preempted_stream_continues_from_its_tokens():
    driver = filled(64)
    driver.say("d0", Tokens("a63.0", [8, 7]))
    driver.ask_as("b", "b0")
    while not driver.running("b"):
        effects = driver.tick_until_due()
    driver.run_all(effects)
    effects = driver.say("d0", Tokens("b0.0", [8], FinishReason.STOP))
    [(_, message)] = sent(effects, Prefill)
    assert message.seq_id == "a63.1"
    assert message.token_ids == [1, 2, 3, 4, 5, 9, 8, 7]


def test_keys_converge_to_even_shares_and_keep_them():
    driver = filled()
    for number in range(100):
        driver.ask_as("b", f"b{number}", max_tokens=1000)
    for _ in range(20):
        driver.run_all(driver.tick_until_due())
    assert (len(driver.running("a")), len(driver.running("b"))) == (32, 32)
    taken = driver.machine.counters["retried", "another key's turn"]
    for _ in range(20):
        driver.run_all(driver.tick_until_due())
    assert driver.machine.counters["retried", "another key's turn"] == taken == 32


def test_a_key_alone_may_fill_all_workers():
    driver = filled()
    driver.tick_until_due()
    due_s = driver.machine.next_wake_s()
    assert due_s is not None
    assert due_s > driver.now_s + 10  # only the requests' own deadlines remain
    assert driver.machine.counters["retried", "another key's turn"] == 0


def test_names_without_keys_take_no_turns():
    driver = filled()
    driver.ask_as("b", "b0", has_key=False)
    for _ in range(10):
        driver.now_s += LOOK_EVERY_S
        driver.handle(Tick())
    assert not driver.running("b")


def test_large_request_gets_the_memory_it_needs_within_its_fair_share():
    driver = Keys("p0", prefill_backlog_tokens=10_000)
    driver.join("d0", num_blocks=100, max_running=64)  # room for 400 tokens
    for number in range(10):
        driver.run_all(driver.ask_as("a", f"a{number}", max_tokens=35))
    assert len(driver.running("a")) == 10
    driver.ask_as("b", "large", num_prompt=100, max_tokens=20)
    driver.ask_as("c", "too large", num_prompt=240, max_tokens=20)
    for _ in range(8):
        driver.run_all(driver.tick_until_due())
    assert len(driver.running("b")) == 1
    assert len(driver.running("a")) == 7
    assert not driver.running("c")


def test_a_key_that_holds_most_passes_no_request_of_its_own_that_gave_way():
    driver = Keys("p0", prefill_backlog_tokens=10_000)
    driver.join("d0", num_blocks=100, max_running=64)  # room for 400 tokens
    for number in range(4):
        driver.run_all(driver.ask_as("a", f"a{number}", max_tokens=35))
    driver.run_all(driver.ask_as("a", "large", num_prompt=20, max_tokens=220))
    driver.ask_as("b", "b0", max_tokens=35)
    while not driver.running("b"):
        driver.run_all(driver.tick_until_due())
    driver.ask_as("a", "small")  # would fit on the worker, and would make "large" wait longer
    for _ in range(10):
        driver.now_s += LOOK_EVERY_S
        driver.run_all(driver.handle(Tick()))
    assert driver.machine.queue_len == 2
    assert len(driver.running("a")) == 4


def test_first_request_of_a_key_is_admitted_after_1100_of_another():
    driver = Keys("p0", prefill_backlog_tokens=10_000)
    driver.join("d0", num_blocks=100_000, max_running=1)
    refused = [outcome for i in range(1100) for outcome in ends(driver.ask_as("a", f"a{i}"))]
    assert len(refused) == 75  # one request runs and 1024 wait
    [end] = [e for e in driver.ask_as("b", "b0") if isinstance(e, Update)]
    assert end.request_id == "a1024"  # the newest waiting request
    assert isinstance(end.outcome, Rejected)
    assert end.outcome.retry_after_s > 0
    assert "b0" in driver.machine.state.flights
    assert driver.machine.queue_len == 1024


def test_keys_with_equal_shares_of_a_full_queue_lose_nothing():
    driver = Keys("p0", prefill_backlog_tokens=10_000, max_queue=10)
    driver.join("d0", num_blocks=100_000, max_running=1)
    for i in range(6):
        driver.ask_as("a", f"a{i}")
        driver.ask_as("b", f"b{i}")
    [refused] = ends(driver.ask_as("b", "one more"))
    assert isinstance(refused, Rejected)
    assert "waiting already" in refused.message


def test_without_keys_a_full_queue_refuses_new_requests():
    driver = Keys("p0", prefill_backlog_tokens=10_000, max_queue=4)
    driver.join("d0", num_blocks=100_000, max_running=1)
    for i in range(5):
        driver.ask_as("a", f"a{i}", has_key=False)
    [end] = [e for e in driver.ask_as("b", "b0", has_key=False) if isinstance(e, Update)]
    assert end.request_id == "b0"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_request_ends_once_for_random_keys(seed):
    rng = random.Random(seed)
    driver = Keys("p0", prefill_backlog_tokens=10_000, max_queue=6)
    driver.join("d0", num_blocks=60, max_running=4)
    driver.join("m0", num_blocks=60, max_running=2)
    asked, ended = 0, []

    def take(effects):
        ended.extend(e.request_id for e in updates(effects) if e.outcome is not None)

    for _ in range(60):
        match rng.randrange(3):
            case 0:
                key = rng.choice("abc")
                take(driver.ask_as(key, f"{key}{asked}", max_tokens=rng.randrange(1, 60)))
                asked += 1
            case 1:
                driver.now_s += rng.random()
                take(driver.handle(Tick()))
            case 2:
                live = [f.attempt for f in driver.machine.state.flights.values() if f.attempt]
                if live and (attempt := rng.choice(live)).started_s is None:
                    take(driver.say(attempt.prefill, PrefillStarted(attempt.seq_id, 0, LEASE)))
                    take(driver.say(attempt.prefill, PrefillDone(attempt.seq_id, 9, None)))
                    if attempt.hands_over and attempt.seq_id in driver.machine.state.by_seq:
                        take(driver.say(attempt.decode, KvReady(attempt.seq_id, 2, 0, "shm")))
                elif live and attempt.is_decoding:
                    tokens = Tokens(attempt.seq_id, [1], FinishReason.STOP)
                    take(driver.say(attempt.decode, tokens))
    assert len(ended) == len(set(ended)) == asked - driver.machine.num_flights


@pytest.mark.parametrize("after_s", [None, 5.0])
def test_wait_of_a_key_is_configurable(after_s):
    driver = filled(turn_after_s=after_s)
    driver.ask_as("b", "b0")
    for _ in range(12):
        driver.now_s += LOOK_EVERY_S
        driver.handle(Tick())
    assert not driver.running("b")
