"""The request machine when roles change: running sequences move, waiting ones restart."""

import msgspec
import pytest

from engine.messages import (
    PREEMPTED,
    ROLE_CHANGED,
    WRONG_ROLE,
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    KvReady,
    LeaseRef,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    RequestId,
    Role,
    RoleChanged,
    Tokens,
    TransferAddress,
)
from router.machine.events import ClientGone, Tick, WorkerLost
from router.machine.flight import DRAINED
from router.machine.moves.copying import NOT_HANDED_OVER
from router.machine.moves.moving import NOT_MOVED
from router.machine.moves.rule import GATHER_S
from router.machine.moves.stages import MoveStage
from router.machine.requests import Cancelled, Failed, Finished, Update
from tests.kits.router.machine import LEASE, Driver, ends, sent

MOVED = LeaseRef("r.1.moved", TransferAddress("d0", "inc", "tcp://d0"), 2)
LONG = msgspec.structs.replace(MOVED, num_blocks=9)
COPIED = LeaseRef("r.1.copy.prefix", TransferAddress("d0", "inc", "tcp://d0"), 1)
NOT_HELD = PrefixOffered("r.1.copy", None)
TO_PREFILL, TO_DECODE = RoleChanged(Role.PREFILL), RoleChanged(Role.DECODE)
TO_NOTHING = RoleChanged(Role.DRAINED)


def delivered(effects):
    return [e.token_ids for e in effects if isinstance(e, Update)]


def promised(driver: Driver) -> dict[str, int]:
    return {i: w.reserved_blocks for i, w in driver.machine.view.workers.items()}


def copied(driver: Driver, seq_id="r.1", source="d0", target="d1"):
    """Sends all messages of source and sink until the source is ordered to stop the sequence."""
    driver.say(source, PrefixOffered(f"{seq_id}.copy", COPIED))
    return driver.say(target, KvReady(f"{seq_id}.copy", 1, 0, "shm", 0.5))


@pytest.fixture
def running() -> Driver:
    """Returns a driver with a request that decodes on d0 and has three tokens of its answer."""
    driver = Driver("p0", "d0", "d1")
    driver.ask(max_tokens=20)
    driver.hand_over()
    driver.say("d0", Tokens("r.0", [8, 7]))
    return driver


@pytest.fixture
def copying(running) -> Driver:
    """The running request is to be copied to d1."""
    effects = running.say("d0", TO_PREFILL)
    offer = OfferPrefix("r.1.copy", [1, 2, 3, 4, 5, 9, 8, 7])
    assert sent(effects, OfferPrefix) == [("d0", offer)]
    assert not sent(effects, HandOver)
    return running


@pytest.fixture
def moving(copying) -> Driver:
    """The request is moving to d1, and d0 has stopped its sequence."""
    assert sent(copied(copying), HandOver) == [("d0", HandOver("r.0", "r.1"))]
    return copying


def test_sequence_moves_with_room_reserved_when_its_worker_stops_decoding(moving):
    assert promised(moving) == {"p0": 0, "d0": 7, "d1": 7}
    assert moving.machine.counters["role changed", "prefill"] == 1


def test_tokens_are_delivered_until_the_sequence_has_stopped(moving):
    assert delivered(moving.say("d0", Tokens("r.0", [6]))) == [(6,)]


def test_target_continues_from_all_tokens_but_the_last(moving):
    moving.say("d0", Tokens("r.0", [6]))
    effects = moving.say("d0", HandedOver("r.0", MOVED, 4))
    [(worker, decode)] = sent(effects, Decode)
    assert (worker, decode.seq_id, decode.lease) == ("d1", "r.1", MOVED)
    assert decode.token_ids == [1, 2, 3, 4, 5, 9, 8, 7]
    assert (decode.limits.max_len, decode.num_draft_tokens) == (25, 4)
    assert sent(effects, FirstToken) == [("d1", FirstToken("r.1", 6))]
    assert promised(moving) == {"p0": 0, "d0": 0, "d1": 7}
    assert moving.machine.counters["moved", ROLE_CHANGED] == 1
    moving.say("d1", KvReady("r.1", 2, 0, "shm"))
    moving.say("d1", DecodeStarted("r.1"))
    assert delivered(moving.say("d1", Tokens("r.1", [5]))) == [(5,)]
    effects = moving.say("d1", Tokens("r.1", [4], FinishReason.STOP))
    assert ends(effects) == [Finished(FinishReason.STOP)]
    assert not sent(effects, Cancel)


def test_move_is_no_attempt(moving):
    moving.say("d0", HandedOver("r.0", MOVED))
    effects = moving.say("d1", Tokens("r.1", [4], FinishReason.STOP))
    assert (effects[-1].timeline.attempts, effects[-1].timeline.moves) == (1, 1)
    assert effects[-1].timeline.decode_worker == "d1"


def test_a_drained_worker_is_emptied_in_the_same_way(running):
    running.say("d0", TO_NOTHING)
    copied(running)
    running.say("d0", HandedOver("r.0", MOVED))
    assert running.machine.counters["moved", DRAINED] == 1


def test_an_answer_that_ends_before_it_has_stopped_needs_no_room_elsewhere(moving):
    effects = moving.say("d0", Tokens("r.0", [6], FinishReason.STOP))
    assert ends(effects) == [Finished(FinishReason.STOP)]
    assert not any(promised(moving).values())
    assert moving.say("d0", HandedOver("r.0", None)) == []


def test_leaving_client_frees_a_possible_lease(moving):
    effects = moving.handle(ClientGone(RequestId("r")))
    assert ends(effects) == [Cancelled()]
    assert ("d0", Cancel("r.1")) in sent(effects, Cancel)
    assert not any(promised(moving).values())
    assert moving.say("d0", HandedOver("r.0", MOVED)) == []


@pytest.mark.parametrize("news", [[], [KvReady("r.1", 2, 0, "shm")]])
def test_moved_request_is_cancelled_at_both_workers(moving, news):
    moving.say("d0", HandedOver("r.0", MOVED))
    for message in news:
        moving.say("d1", message)
    effects = moving.handle(ClientGone(RequestId("r")))
    assert set(sent(effects, Cancel)) == {("d0", Cancel("r.1")), ("d1", Cancel("r.1"))}


def test_failed_hand_over_is_prefilled_again_without_counting():
    driver = Driver("p0", "d0", "d1", max_attempts=1)
    driver.ask(max_tokens=20)
    driver.hand_over()
    driver.say("d0", TO_NOTHING)
    copied(driver)
    effects = driver.say("d0", HandedOver("r.0", None))
    assert [m.token_ids for _, m in sent(effects, Prefill)] == [[1, 2, 3, 4, 5, 9]]
    assert driver.machine.counters["retried", NOT_HANDED_OVER] == 1
    assert promised(driver)["d1"] == 7


def test_lost_target_is_replaced_without_telling_the_source():
    driver = Driver("p0", "d0", "d1", "d2")
    driver.ask(max_tokens=20)
    driver.hand_over()
    driver.say("d0", TO_NOTHING)
    copied(driver)
    assert promised(driver)["d1"] == 7
    assert driver.handle(WorkerLost("d1", "gone")) == []
    assert promised(driver) == {"p0": 0, "d0": 7, "d2": 7}
    driver.say("d2", TO_PREFILL)  # d2 does not decode any longer either
    assert driver.machine.counters["retried", ROLE_CHANGED] == 1


def test_target_lost_after_the_hand_over_costs_a_prefill(moving):
    moving.say("d0", HandedOver("r.0", MOVED))
    effects = moving.handle(WorkerLost("d1", "gone"))
    assert ("d0", Cancel("r.1")) in sent(effects, Cancel)
    assert ends(effects) == []  # no third worker has joined yet
    [(_, again)] = sent(moving.join("d2"), Prefill)
    assert again.seq_id == "r.2"


def test_source_lost_before_the_pull_costs_a_prefill(moving):
    moving.say("d0", HandedOver("r.0", MOVED))
    [(worker, message)] = sent(moving.handle(WorkerLost("d0", "gone")), Prefill)
    assert (worker, message.token_ids) == ("p0", [1, 2, 3, 4, 5, 9, 8, 7])


def test_source_lost_after_the_pull_costs_nothing(moving):
    moving.say("d0", HandedOver("r.0", MOVED))
    moving.say("d1", KvReady("r.1", 2, 0, "shm"))
    assert moving.handle(WorkerLost("d0", "gone")) == []


def test_a_pull_that_fails_costs_a_prefill(moving):
    moving.say("d0", HandedOver("r.0", MOVED))
    effects = moving.say("d1", GivenBack("r.1", "pull failed: why"))
    assert sent(effects, Prefill)[0][1].seq_id == "r.2"


# ---------------------------------------------------------------- copies before a move


def test_full_blocks_are_copied_while_the_sequence_runs_and_its_room_is_reserved(copying):
    effects = copying.say("d0", PrefixOffered("r.1.copy", COPIED))
    [(worker, copy)] = sent(effects, Decode)
    assert (worker, copy.seq_id, copy.token_ids) == ("d1", "r.1.copy", [1, 2, 3, 4])
    assert (copy.lease, copy.limits.max_len) == (COPIED, 5)
    assert copying.machine.view.workers["d1"].decodes["r.1"].is_there
    assert delivered(copying.say("d0", Tokens("r.0", [6]))) == [(6,)]
    assert promised(copying) == {"p0": 0, "d0": 7, "d1": 7}


def test_copy_is_released_when_the_sequence_has_arrived(moving):
    effects = moving.say("d0", HandedOver("r.0", MOVED))
    assert sent(effects, Cancel) == [("d1", Cancel("r.1.copy"))]
    assert [e.message.seq_id for e in effects] == ["r.1", "r.1", "r.1.copy"]


def test_sequence_without_full_blocks_is_stopped_at_once(copying):
    effects = copying.say("d0", NOT_HELD)
    assert sent(effects, HandOver) == [("d0", HandOver("r.0", "r.1"))]


def test_less_than_a_block_is_not_offered():
    driver = Driver("p0", "d0", "d1")
    driver.ask(prompt=(1, 2), max_tokens=20)
    driver.hand_over()
    effects = driver.say("d0", TO_NOTHING)
    assert sent(effects, HandOver) == [("d0", HandOver("r.0", "r.1"))]
    assert not sent(effects, OfferPrefix)


def test_answer_that_ends_while_copied_leaves_nothing(copying):
    copying.say("d0", PrefixOffered("r.1.copy", COPIED))
    effects = copying.say("d0", Tokens("r.0", [6], FinishReason.STOP))
    cancels = [("d0", Cancel("r.1.copy")), ("d1", Cancel("r.1.copy"))]
    assert sent(effects, Cancel) == cancels
    assert not any(promised(copying).values())
    assert copying.say("d1", KvReady("r.1.copy", 1, 0, "shm")) == []


@pytest.mark.parametrize("news", ["gone", "another role"])
def test_target_lost_before_the_stop_costs_nothing(copying, news):
    copying.say("d0", PrefixOffered("r.1.copy", COPIED))
    copying.join("d2")
    if news == "gone":
        effects = copying.handle(WorkerLost("d1", "gone"))
    else:
        effects = copying.say("d1", TO_PREFILL)
    assert ("d0", Cancel("r.1.copy")) in sent(effects, Cancel)
    assert [(i, m.seq_id) for i, m in sent(effects, OfferPrefix)] == [("d0", "r.2.copy")]
    assert promised(copying)["d2"] == 7
    assert sent(copied(copying, "r.2", target="d2"), HandOver) == [("d0", HandOver("r.0", "r.2"))]
    assert copying.machine.counters["retried", ROLE_CHANGED] == 0


def test_sequence_without_a_target_runs_on(copying):
    copying.handle(WorkerLost("d1", "gone"))
    assert list(copying.machine.state.moves.at(MoveStage.STRANDED)) == ["r"]
    assert delivered(copying.say("d0", Tokens("r.0", [6]))) == [(6,)]
    assert promised(copying) == {"p0": 0, "d0": 7}


def test_worker_that_decodes_again_keeps_sequences_being_copied(copying):
    effects = copying.say("d0", TO_DECODE)
    assert sent(effects, Cancel) == [("d0", Cancel("r.1.copy")), ("d1", Cancel("r.1.copy"))]
    assert promised(copying) == {"p0": 0, "d0": 7, "d1": 0}


def test_sequence_moves_if_its_worker_decodes_again_too_late(moving):
    assert moving.say("d0", TO_DECODE) == []
    assert sent(moving.say("d0", HandedOver("r.0", MOVED)), Decode)


def test_failed_copy_is_repeated_elsewhere(copying):
    copying.say("d0", PrefixOffered("r.1.copy", COPIED))
    copying.join("d2")
    effects = copying.say("d1", GivenBack("r.1.copy", "pull failed: why"))
    assert [(i, m.seq_id) for i, m in sent(effects, OfferPrefix)] == [("d0", "r.2.copy")]
    assert promised(copying) == {"p0": 0, "d0": 7, "d1": 0, "d2": 7}
    assert copying.machine.counters["fallback", "copy failed"] == 1


def be_late(driver: Driver, until_s: float):
    """Lets time pass without a message about the copy, while tokens of the answer arrive."""
    while driver.now_s < until_s:
        driver.say("d0", Tokens("r.0", [6]), after_s=min(2.5, until_s - driver.now_s))
    return driver.handle(Tick())


def test_late_copy_is_repeated_once_and_severs_no_workers(copying):
    timeout_s = copying.machine.state.config.move_timeout_s
    began_s = copying.now_s
    effects = be_late(copying, began_s + timeout_s)
    assert ("d1", Cancel("r.1.copy")) in sent(effects, Cancel)
    assert sent(effects, OfferPrefix)[0][1].seq_id == "r.2.copy"
    effects = be_late(copying, began_s + 2 * timeout_s)
    assert ("d1", Cancel("r.2.copy")) in sent(effects, Cancel)
    assert sent(effects, Prefill)
    assert copying.machine.counters["fallback", "copy late"] == 2
    assert copying.machine.counters["retried", NOT_MOVED] == 1
    assert not copying.machine.view.severed


def test_move_whose_pulls_all_fail_ends_in_time_and_is_no_attempt():
    driver = Driver("p0", "d0", "d1", max_attempts=1)
    driver.ask(max_tokens=60)
    driver.hand_over()
    began_s, effects, prefills = driver.now_s, driver.say("d0", TO_NOTHING), []
    while driver.now_s < began_s + 70 and not prefills:
        for source, offer in sent(effects, OfferPrefix):
            driver.say(source, PrefixOffered(offer.seq_id, COPIED))
            effects = driver.say("d1", GivenBack(offer.seq_id, "pull failed: why"), after_s=0.1)
            prefills += sent(effects, Prefill)
        if not prefills:
            driver.say("d0", Tokens("r.0", [6]), after_s=1.0)
            effects = driver.handle(Tick())
            prefills += sent(effects, Prefill)
    timeout_s = driver.machine.state.config.move_timeout_s
    assert prefills
    assert driver.now_s <= began_s + timeout_s + 2
    assert driver.machine.counters["retried", NOT_MOVED] == 1
    [(worker, prefill)] = prefills
    driver.hand_over(prefill.seq_id, worker, "d1")
    effects = driver.say("d1", Tokens(prefill.seq_id, [4], FinishReason.STOP))
    assert (effects[-1].timeline.attempts, effects[-1].timeline.moves) == (2, 0)


@pytest.mark.parametrize("reason", [WRONG_ROLE, ROLE_CHANGED, PREEMPTED])
def test_refused_copy_is_repeated_later_and_severs_no_workers(copying, reason):
    copying.say("d0", PrefixOffered("r.1.copy", COPIED))
    effects = copying.say("d1", GivenBack("r.1.copy", reason))
    assert not sent(effects, OfferPrefix)
    assert not copying.machine.view.severed
    assert promised(copying)["d1"] == 0
    assert list(copying.machine.state.moves.at(MoveStage.STRANDED)) == ["r"]
    copying.now_s = copying.machine.next_wake_s()
    assert sent(copying.handle(Tick()), OfferPrefix)[0][1].seq_id == "r.2.copy"


def test_sequence_that_loses_a_complete_copy_leaves_at_once():
    driver = leaving("abc")
    assert copy_one(driver, "a") == []
    effects = driver.say(target_of(driver, "a"), GivenBack("a.1.copy", PREEMPTED))
    assert sent(effects, HandOver) == [("d0", HandOver("a.0", "a.1"))]
    assert driver.machine.counters["fallback", "copy failed"] == 1
    effects = driver.say("d0", HandedOver("a.0", LONG))
    assert not sent(effects, Cancel)
    [(_, decode)] = sent(effects, Decode)
    assert not decode.is_moved


def lose_target(driver: Driver) -> None:
    copied(driver)
    driver.join("d2")
    driver.handle(WorkerLost("d1", "gone"))


@pytest.mark.parametrize(
    ("before", "lease", "is_moved"),
    [
        (copied, LONG, True),
        (lambda driver: driver.say("d0", NOT_HELD), LONG, False),
        (lambda driver: driver.say("d0", NOT_HELD), MOVED, True),
        (lose_target, LONG, False),
    ],
    ids=["copied", "nothing to copy", "of little", "another target"],
)
def test_target_steps_wait_for_a_small_last_pull(copying, before, lease, is_moved):
    before(copying)
    [(_, decode)] = sent(copying.say("d0", HandedOver("r.0", lease)), Decode)
    assert decode.is_moved is is_moved


def test_few_sequences_are_copied_at_a_time_with_deadlines_from_their_turn(monkeypatch):
    monkeypatch.setattr("router.machine.moves.copying.COPY_AT_ONCE", 2)
    driver = Driver("p0", "d0")
    for name in "abcd":
        driver.ask(name, max_tokens=20)
        driver.hand_over(f"{name}.0")
    driver.join("d1")
    effects = driver.say("d0", TO_NOTHING)
    assert [m.seq_id for _, m in sent(effects, OfferPrefix)] == ["a.1.copy", "b.1.copy"]
    assert len(driver.machine.view.workers["d1"].decodes) == 4  # d1 has room for all
    driver.say("d0", PrefixOffered("a.1.copy", COPIED))
    effects = driver.say("d1", KvReady("a.1.copy", 1, 0, "shm"), after_s=3.0)
    assert [m.seq_id for _, m in sent(effects, OfferPrefix)] == ["c.1.copy"]
    due_s = driver.machine.state.flights["c"].attempt.move.copy_due_s
    assert due_s == driver.now_s + driver.machine.state.config.move_timeout_s
    effects = driver.say("d0", Tokens("b.0", [6], FinishReason.STOP))
    assert [m.seq_id for _, m in sent(effects, OfferPrefix)] == ["d.1.copy"]


def leaving(names) -> Driver:
    """Returns a driver with requests of these names on drained d0, to be copied to d1 or d2."""
    driver = Driver("p0", "d0")
    for name in names:
        driver.ask(name, max_tokens=20)
        driver.hand_over(f"{name}.0")
    for other in ("d1", "d2"):
        driver.join(other)
    driver.say("d0", TO_NOTHING)
    return driver


def target_of(driver: Driver, name: str) -> str:
    return driver.machine.state.flights[name].attempt.move.decode


def copy_one(driver: Driver, name: str) -> list[str]:
    """Completes a copy. Returns the sequences that then have an order to stop."""
    effects = copied(driver, f"{name}.1", target=target_of(driver, name))
    return [m.seq_id for _, m in sent(effects, HandOver)]


def test_sequences_of_a_worker_leave_together_when_all_are_copied():
    driver = leaving("abcd")
    assert {target_of(driver, name) for name in "abcd"} == {"d1", "d2"}
    told = [copy_one(driver, name) for name in "abcd"]
    assert told == [[], [], [], ["a.0", "b.0", "c.0", "d.0"]]


def test_copied_sequence_does_not_wait_for_one_that_ends():
    driver = leaving("ab")
    assert copy_one(driver, "a") == []
    effects = driver.say("d0", Tokens("b.0", [6], FinishReason.STOP))
    assert sent(effects, HandOver) == [("d0", HandOver("a.0", "a.1"))]


def test_copied_sequence_waits_for_others_for_a_bounded_time():
    driver = leaving("abc")
    assert copy_one(driver, "a") == []
    driver.now_s += 0.2
    assert copy_one(driver, "b") == []
    assert driver.machine.next_wake_s() == pytest.approx(driver.now_s - 0.2 + GATHER_S)
    driver.now_s = driver.machine.next_wake_s()
    told = sent(driver.handle(Tick()), HandOver)
    assert [m.seq_id for _, m in told] == ["a.0", "b.0"]
    assert driver.machine.next_wake_s() > driver.now_s


def test_next_sequences_leave_when_all_that_left_run_again(monkeypatch):
    monkeypatch.setattr("router.machine.moves.copying.LEAVE_AT_ONCE", 2)
    driver = leaving("abcd")
    assert [copy_one(driver, name) for name in "abcd"] == [[], ["a.0", "b.0"], [], []]
    targets = {name: target_of(driver, name) for name in "ab"}
    told = []
    for name, target in targets.items():
        driver.say("d0", HandedOver(f"{name}.0", MOVED))
        effects = driver.say(target, KvReady(f"{name}.1", 2, 0, "shm"))
        told.append([m.seq_id for _, m in sent(effects, HandOver)])
    assert told == [[], ["c.0", "d.0"]]


def test_sequence_that_cannot_continue_holds_others_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr("router.machine.moves.copying.LEAVE_AT_ONCE", 2)
    driver = leaving("abcd")
    for name in "abcd":
        copy_one(driver, name)
    target = target_of(driver, "a")
    driver.say("d0", HandedOver("a.0", MOVED))
    assert not sent(driver.say(target, KvReady("a.1", 2, 0, "shm")), HandOver)
    driver.now_s += GATHER_S
    told = sent(driver.handle(Tick()), HandOver)  # during the move of b
    assert [m.seq_id for _, m in told] == ["c.0"]


# ---------------------------------------------------------------- moves without room


@pytest.fixture
def stranded() -> Driver:
    """Two running requests, of which only one has room on another worker."""
    driver = Driver("p0", "d0", "d1", num_blocks=7)
    for name in ("a", "b"):
        driver.ask(name, max_tokens=20)
        driver.hand_over(f"{name}.0", decode="d0" if name == "a" else "d1")
    assert not sent(driver.say("d0", TO_NOTHING), HandOver)
    return driver


def test_stranded_sequence_moves_when_there_is_room(stranded):
    assert delivered(stranded.say("d0", Tokens("a.0", [8]))) == [(8,)]
    effects = stranded.say("d1", Tokens("b.0", [8], FinishReason.STOP))
    assert [(i, m.seq_id) for i, m in sent(effects, OfferPrefix)] == [("d0", "a.1.copy")]


def test_stranded_sequence_is_retried_every_second(stranded):
    assert stranded.machine.next_wake_s() == stranded.now_s + 1
    stranded.now_s += 1
    assert stranded.handle(Tick()) == []
    assert stranded.machine.next_wake_s() == stranded.now_s + 1


def test_sequence_stranded_for_long_runs_on(stranded):
    for _ in range(30):
        stranded.now_s += 1
        assert stranded.handle(Tick()) == []
    effects = stranded.say("d1", Tokens("b.0", [8], FinishReason.STOP))
    assert [(i, m.seq_id) for i, m in sent(effects, OfferPrefix)] == [("d0", "a.1.copy")]
    assert stranded.machine.counters["retried", NOT_MOVED] == 0


def test_large_sequence_without_room_does_not_block_a_smaller_one():
    driver = Driver("p0", "d0")
    for name, max_tokens in (("large", 40), ("small", 20)):
        driver.ask(name, max_tokens=max_tokens)
        driver.hand_over(f"{name}.0")
    driver.say("d0", TO_NOTHING)
    assert sorted(driver.machine.state.moves.at(MoveStage.STRANDED)) == ["large", "small"]
    effects = driver.join("d1", num_blocks=8)
    assert [m.seq_id for _, m in sent(effects, OfferPrefix)] == ["small.1.copy"]
    assert list(driver.machine.state.moves.at(MoveStage.STRANDED)) == ["large"]


def test_without_other_workers_sequences_run_to_their_ends():
    driver = Driver("p0", "d0")
    driver.ask(max_tokens=20)
    driver.hand_over()
    driver.say("d0", TO_NOTHING)
    driver.now_s += 30
    assert driver.handle(Tick()) == []
    assert ends(driver.say("d0", Tokens("r.0", [8], FinishReason.STOP)))


def test_worker_that_decodes_again_keeps_stranded_sequences(stranded):
    stranded.say("d0", TO_DECODE)
    assert not stranded.machine.state.moves.at(MoveStage.STRANDED)
    stranded.now_s += 20
    assert stranded.handle(Tick()) == []


# ---------------------------------------------------------------- requests before decode


@pytest.mark.parametrize("num_news", range(3))
def test_attempt_that_does_not_decode_yet_restarts_elsewhere(num_news):
    driver = Driver("p0", "d0", "d1", max_attempts=1)
    driver.ask(max_tokens=20)
    news = [PrefillStarted("r.0", 0, LEASE), PrefillDone("r.0", 9, None)]
    for message in news[:num_news]:
        driver.say("p0", message)
    effects = driver.say("d0", TO_PREFILL)
    assert ("d0", Cancel("r.0")) in sent(effects, Cancel)
    assert [m.seq_id for _, m in sent(effects, Prefill)] == ["r.1"]
    assert promised(driver) == {"p0": 0, "d0": 0, "d1": 7}
    assert driver.say("d0", GivenBack("r.0", ROLE_CHANGED)) == []


def test_a_worker_is_chosen_by_its_new_role():
    driver = Driver("p0", "d0", "d1")
    driver.say("d1", TO_PREFILL)
    driver.say("p0", TO_DECODE)
    [(worker, _)] = sent(driver.ask(), Prefill)
    assert worker == "d1"
    driver.say("d1", PrefillStarted("r.0", 0, LEASE))
    assert driver.machine.view.missing() is None


@pytest.mark.parametrize("reason", [WRONG_ROLE, ROLE_CHANGED])
def test_prompt_returned_after_a_role_change_is_no_attempt(reason):
    driver = Driver("p0", "p1", "d0", max_attempts=1)
    driver.ask()
    assert driver.say("p0", TO_DECODE) == []  # the worker may have started the prompt
    effects = driver.say("p0", GivenBack("r.0", reason))
    assert [(i, m.seq_id) for i, m in sent(effects, Prefill)] == [("p1", "r.1")]
    assert not driver.machine.view.severed


def test_returns_for_a_wrong_role_are_bounded_without_a_role_change():
    driver = Driver("p0", "d0", max_attempts=2)
    driver.ask()
    driver.say("p0", GivenBack("r.0", WRONG_ROLE))
    [outcome] = ends(driver.say("p0", GivenBack("r.1", WRONG_ROLE)))
    assert isinstance(outcome, Failed)


def test_prompt_on_a_worker_that_stopped_decoding_moves_when_done():
    driver = Driver("m0")
    driver.ask(max_tokens=20)
    driver.join("m1")
    driver.say("m0", PrefillStarted("r.0", 0, None))
    assert driver.say("m0", TO_PREFILL) == []
    effects = driver.say("m0", PrefillDone("r.0", 9, None))
    assert [(i, m.seq_id) for i, m in sent(effects, OfferPrefix)] == [("m0", "r.1.copy")]
    assert delivered(effects) == [(9,)]


def test_local_prefillers_stand_in_without_prefill_workers():
    driver = Driver("p0")
    driver.join("d0", stretch=4.0)
    driver.say("p0", TO_NOTHING)
    assert driver.machine.view.missing() is None
    [(worker, _)] = sent(driver.ask(prompt=range(300)), Generate)
    assert worker == "d0"


def test_drained_workers_get_no_requests():
    driver = Driver("p0", "d0")
    driver.say("d0", TO_NOTHING)
    assert driver.machine.view.missing() == "no decode worker"
    assert driver.ask() == []
