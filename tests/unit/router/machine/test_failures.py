"""The request machine with faults: lost workers, deadlines, late messages, full queues."""

import pytest

from engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    Generate,
    GivenBack,
    KvReady,
    LoadReport,
    Prefill,
    PrefillDone,
    PrefillStarted,
    Refused,
    RequestId,
    StepReport,
    ToGateway,
    Tokens,
)
from router.machine.events import ClientGone, FromWorker, Tick, WorkerLost
from router.machine.progress import SEVERED_S
from router.machine.requests import UNFIT, Cancelled, Failed, Finished, Rejected, Update
from tests.kits.router.machine import LEASE, Driver, ends, sent

PROMPT = [1, 2, 3, 4, 5]
STARTED = ("p0", PrefillStarted("r.0", 0, LEASE))
DONE = ("p0", PrefillDone("r.0", 9, None))
KV = ("d0", KvReady("r.0", 2, 0, "shm"))
FIRST_STEP = ("d0", DecodeStarted("r.0"))
TOKENS = ("d0", Tokens("r.0", [8, 7]))

STAGES: dict[str, list[tuple[str, ToGateway]]] = {
    "sent": [],
    "started": [STARTED],
    "prefilled": [STARTED, DONE],
    "kv first": [STARTED, KV],
    "kv there": [STARTED, DONE, KV],
    "decoding": [STARTED, DONE, KV, FIRST_STEP],
    "answering": [STARTED, DONE, KV, FIRST_STEP, TOKENS],
}
DELIVERED = {"prefilled": [9], "kv there": [9], "decoding": [9], "answering": [9, 8, 7]}
NEEDS_PREFILL_WORKER = {"sent", "started", "prefilled", "kv first"}


def in_stage(stage: str, *workers: str, **config) -> Driver:
    """Returns a driver with request `r` in this stage, on p0 and d0."""
    driver = Driver(*(workers or ("p0", "d0", "p1", "d1")), **config)
    driver.ask(max_tokens=20)
    for worker, message in STAGES[stage]:
        driver.say(worker, message)
    return driver


def is_idle(driver: Driver) -> bool:
    workers = driver.machine.view.workers.values()
    return driver.machine.num_flights == driver.machine.queue_len == 0 and not any(
        w.reserved_tokens or w.reserved_blocks for w in workers
    )


# ---------------------------------------------------------------- lost workers


@pytest.mark.parametrize("stage", STAGES)
def test_a_lost_decode_worker_is_replaced_in_every_stage(stage):
    driver = in_stage(stage)
    effects = driver.handle(WorkerLost("d0", "gone"))
    assert sent(effects, Cancel) == [("p0", Cancel("r.0"))]
    [(_, again)] = sent(effects, Prefill)
    assert (again.seq_id, again.token_ids) == ("r.1", PROMPT + DELIVERED.get(stage, []))
    assert again.limits.max_len == len(PROMPT) + 20
    assert not ends(effects)
    assert list(driver.machine.view.workers["d1"].decodes) == ["r.1"]


@pytest.mark.parametrize("stage", STAGES)
def test_lost_prefill_worker_is_replaced_while_it_is_needed(stage):
    driver = in_stage(stage)
    effects = driver.handle(WorkerLost("p0", "gone"))
    if stage not in NEEDS_PREFILL_WORKER:
        assert effects == []
        return
    assert sent(effects, Cancel) == [("d0", Cancel("r.0"))]
    [(worker, again)] = sent(effects, Prefill)
    assert (worker, again.seq_id) == ("p1", "r.1")
    assert again.token_ids == PROMPT + DELIVERED.get(stage, [])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", ["p1", "d1"])
def test_loss_of_an_uninvolved_worker_changes_nothing(stage, victim):
    assert in_stage(stage).handle(WorkerLost(victim, "gone")) == []


@pytest.mark.parametrize("stage", STAGES)
def test_loss_without_a_replacement_cancels_and_waits_for_a_new_worker(stage):
    driver = in_stage(stage, "p0", "d0")
    effects = driver.handle(WorkerLost("d0", "gone"))
    assert sent(effects, Cancel) == [("p0", Cancel("r.0"))]
    assert ends(effects) == []
    driver.now_s += 61
    [outcome] = ends(driver.handle(Tick()))
    assert isinstance(outcome, Failed | Rejected)
    assert "no decode worker came in time" in repr(outcome)
    assert is_idle(driver)


def test_a_lost_mixed_worker_is_replaced_by_another():
    driver = Driver("m0", "m1")
    driver.ask(max_tokens=20)
    driver.say("m0", PrefillStarted("r.0", 0, None))
    driver.say("m0", PrefillDone("r.0", 9, None))
    effects = driver.handle(WorkerLost("m0", "gone"))
    assert not sent(effects, Cancel)
    [(worker, again)] = sent(effects, Generate)
    assert (worker, again.token_ids) == ("m1", [*PROMPT, 9])


def test_returned_worker_has_no_claims():
    driver = in_stage("answering", "p0", "d0", "d1")
    driver.handle(WorkerLost("d0", "cut off"))
    driver.join("d0")
    assert driver.machine.view.workers["d0"].reserved_blocks == 0
    assert driver.say("d0", Tokens("r.0", [6])) == []


def test_losing_an_unknown_worker_changes_nothing():
    assert in_stage("decoding").handle(WorkerLost("unknown", "gone")) == []


def test_requests_of_a_lost_worker_keep_their_order():
    driver = Driver("p0", "d0", "d1")
    names = ["a", "b", "c"]
    for name in names:
        driver.ask(name)
    driver.handle(WorkerLost("d1", "gone"))
    driver.handle(WorkerLost("d0", "gone"))
    effects = driver.join("d2")
    assert [m.seq_id[0] for _, m in sent(effects, Prefill)] == names


def test_requests_of_a_lost_worker_go_first():
    driver = Driver("p0", "d0", prefill_backlog_tokens=10)
    for name in ("a", "b", "c"):  # five tokens each: the third request waits
        driver.ask(name)
    assert driver.machine.queue_len == 1
    driver.join("d1")
    effects = driver.handle(WorkerLost("d0", "gone"))
    assert [m.seq_id for _, m in sent(effects, Prefill)] == ["a.1", "b.1"]
    assert driver.machine.queue_len == 1


def test_joining_worker_gets_waiting_requests():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1)
    driver.ask("a")
    driver.ask("b")
    [(worker, message)] = sent(driver.join("p1"), Prefill)
    assert (worker, message.seq_id) == ("p1", "b.0")


# ---------------------------------------------------------------- attempts


def test_each_attempt_has_its_own_sequence_id():
    driver = Driver("p0", "d0", max_attempts=4)
    driver.ask()
    for number in range(3):
        effects = driver.say("p0", GivenBack(f"r.{number}", "lease expired"))
        assert [m.seq_id for _, m in sent(effects, Prefill)] == [f"r.{number + 1}"]
    [outcome] = ends(driver.say("p0", GivenBack("r.3", "lease expired")))
    assert outcome == Failed("given up after 4 attempts; the last one: lease expired")
    assert is_idle(driver)
    assert driver.machine.counters["retried", "lease expired"] == 4


OLD_NEWS: list[tuple[str, ToGateway]] = [
    ("p0", PrefillStarted("r.0", 0, LEASE)),
    ("p0", PrefillDone("r.0", 9, None)),
    ("p0", PrefillDone("r.0", 9, FinishReason.STOP)),
    ("d0", KvReady("r.0", 2, 0, "shm")),
    ("d0", DecodeStarted("r.0")),
    ("d0", Tokens("r.0", [6], FinishReason.STOP)),
    ("d0", GivenBack("r.0", "preempted")),
    ("p0", GivenBack("never.0", "heard of")),
]


@pytest.mark.parametrize(("worker", "message"), OLD_NEWS)
@pytest.mark.parametrize("stage", STAGES)
def test_messages_of_a_past_attempt_change_nothing(stage, worker, message):
    driver = in_stage(stage)
    driver.say("d0", GivenBack("r.0", "preempted"))
    deadline_s = driver.machine.next_wake_s()
    assert driver.say(worker, message, after_s=1) == []
    assert driver.machine.next_wake_s() == deadline_s


@pytest.mark.parametrize(("worker", "message"), OLD_NEWS)
def test_messages_of_a_past_request_change_nothing(worker, message):
    driver = in_stage("decoding")
    driver.handle(ClientGone(RequestId("r")))
    assert driver.say(worker, message) == []
    assert is_idle(driver)


def test_after_a_failed_pull_its_two_workers_are_kept_apart_for_a_while():
    driver = in_stage("prefilled", "p0", "p1", "d0")
    effects = driver.say("d0", GivenBack("r.0", "pull failed: source silent"))
    assert [worker for worker, _ in sent(effects, Prefill)] == ["p1"]
    driver.hand_over("r.1", prefill="p1")
    driver.say("d0", Tokens("r.1", [5], FinishReason.LENGTH))
    assert [worker for worker, _ in sent(driver.ask("soon"), Prefill)] == ["p1"]
    driver.say("p1", PrefillDone("soon.0", 9, FinishReason.STOP))
    driver.now_s += SEVERED_S
    assert [worker for worker, _ in sent(driver.ask("later"), Prefill)] == ["p0"]


def test_sequence_returned_after_its_pull_severs_no_workers():
    driver = in_stage("answering", "p0", "p1", "d0")
    effects = driver.say("d0", GivenBack("r.0", "no room"))
    assert [worker for worker, _ in sent(effects, Prefill)] == ["p0"]


def test_retry_continues_the_answer():
    driver = in_stage("answering", "p0", "d0")
    driver.say("d0", GivenBack("r.0", "no room"))
    [(_, decode)] = sent(driver.say("p0", PrefillStarted("r.1", 4, LEASE)), Decode)
    assert decode.token_ids == [*PROMPT, 9, 8, 7]
    effects = driver.say("p0", PrefillDone("r.1", 6, None))
    assert [e.token_ids for e in effects if isinstance(e, Update)] == [(6,)]
    assert sent(effects, FirstToken) == [("d0", FirstToken("r.1", 6))]
    assert ends(driver.say("d0", Tokens("r.1", [5], FinishReason.LENGTH)))
    assert is_idle(driver)


# ---------------------------------------------------------------- disconnected clients


@pytest.mark.parametrize("stage", STAGES)
def test_cancelled_request_is_cancelled_at_both_workers(stage):
    driver = in_stage(stage)
    effects = driver.handle(ClientGone(RequestId("r")))
    assert sent(effects, Cancel) == [("p0", Cancel("r.0")), ("d0", Cancel("r.0"))]
    assert ends(effects) == [Cancelled()]
    assert is_idle(driver)
    assert driver.handle(ClientGone(RequestId("r"))) == []


def test_mixed_worker_gets_one_cancel():
    driver = Driver("m0")
    driver.ask()
    assert sent(driver.handle(ClientGone(RequestId("r"))), Cancel) == [("m0", Cancel("r.0"))]


def test_cancelled_request_makes_room_for_the_next():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1)
    driver.ask("a")
    driver.ask("b")
    effects = driver.handle(ClientGone(RequestId("a")))
    assert [m.seq_id for _, m in sent(effects, Prefill)] == ["b.0"]


# ---------------------------------------------------------------- answers of one token


def test_answer_of_one_token_is_not_handed_over():
    driver = Driver("p0", "d0")
    [(_, message)] = sent(driver.ask(max_tokens=1), Prefill)
    assert message.limits.max_len == len(PROMPT) + 1
    assert not sent(driver.say("p0", PrefillStarted("r.0", 0, None)), Decode)
    effects = driver.say("p0", PrefillDone("r.0", 9, FinishReason.LENGTH))
    assert ends(effects) == [Finished(FinishReason.LENGTH)]
    assert not sent(effects, FirstToken)
    assert is_idle(driver)


# ---------------------------------------------------------------- admission


def test_full_queue_refuses_with_retry_after_and_keeps_nothing():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1, max_queue=1)
    for name in ("a", "b"):
        driver.ask(name)
    [outcome] = ends(driver.ask("c"))
    assert isinstance(outcome, Rejected)
    assert outcome.retry_after_s > 0
    assert (driver.machine.num_flights, driver.machine.queue_len) == (2, 1)
    assert driver.machine.counters["rejected", "queue full"] == 1


def test_a_retry_finds_room_even_in_a_full_queue():
    driver = Driver("p0", "d0", prefill_backlog_tokens=1, max_queue=1)
    for name in ("a", "b"):
        driver.ask(name)
    effects = driver.say("p0", GivenBack("a.0", "lease expired"))
    assert not ends(effects)
    assert [m.seq_id for _, m in sent(effects, Prefill)] == ["a.1"]


def test_impossible_request_does_not_block_others():
    driver = Driver("p0", "d0", num_blocks=5)
    assert ends(driver.ask("huge", max_tokens=100))
    assert sent(driver.ask("small"), Prefill)


def test_decode_memory_is_not_promised_twice():
    driver = Driver("p0", "d0", num_blocks=5)  # a request needs three blocks
    driver.ask("a")
    driver.say("p0", PrefillStarted("a.0", 0, LEASE))
    driver.say("p0", PrefillDone("a.0", 9, None))
    assert not sent(driver.ask("b"), Prefill)
    effects = driver.say("d0", Tokens("a.0", [8], FinishReason.STOP))
    assert [m.seq_id for _, m in sent(effects, Prefill)] == ["b.0"]


# ---------------------------------------------------------------- deadlines


def deadline_of(driver: Driver) -> float:
    return driver.machine.next_wake_s() - driver.now_s


@pytest.mark.parametrize(
    ("stage", "allowed_s"),
    [
        ("sent", 7.0 + 5 / 10),
        ("started", 7.0 + 5 / 10),
        ("kv first", 7.0 + 5 / 10),
        ("prefilled", 7.0),
        ("kv there", 7.0),
        ("answering", 7.0),
    ],
)
def test_deadline_of_a_prompt_grows_with_its_length(stage, allowed_s):
    driver = in_stage(stage, progress_timeout_s=7.0, slowest_prefill_tokens_per_s=10.0)
    assert deadline_of(driver) == allowed_s


@pytest.mark.parametrize("stage", STAGES)
def test_request_without_messages_in_time_is_placed_again(stage):
    driver = in_stage(stage)
    driver.now_s = driver.machine.next_wake_s() - 0.001
    assert driver.handle(Tick()) == []
    driver.now_s += 0.001
    effects = driver.handle(Tick())
    assert sent(effects, Cancel) == [("p0", Cancel("r.0")), ("d0", Cancel("r.0"))]
    assert [m.seq_id for _, m in sent(effects, Prefill)] == ["r.1"]
    assert driver.machine.counters["retried", "no news in time"] == 1


@pytest.mark.parametrize("apart_s", [0.001, 0.0])
def test_requests_late_together_keep_their_order(apart_s):
    driver = Driver("p0", "d0", prefill_backlog_tokens=1000)
    names = ["c", "a", "d", "b"]
    for number, name in enumerate(names):
        driver.now_s = apart_s * number
        driver.ask(name)
    driver.now_s = 1000.0
    placed = [message.seq_id for _, message in sent(driver.handle(Tick()), Prefill)]
    assert placed == [f"{name}.1" for name in names]


def test_reasons_are_counted_without_their_details():
    driver = Driver("p0", "d0", max_attempts=10)
    driver.ask()
    for number in range(3):
        driver.say("p0", GivenBack(f"r.{number}", f"pull failed: no transport: fd {number}"))
    assert driver.machine.counters["retried", "pull failed"] == 3


def test_each_message_moves_the_deadline():
    driver = in_stage("answering")
    allowed_s = deadline_of(driver)
    driver.say("d0", Tokens("r.0", [6]), after_s=50)
    said_s = driver.now_s
    driver.now_s = driver.machine.next_wake_s()
    assert driver.now_s == said_s - 50 + allowed_s  # the deadline is recomputed only at this time
    assert driver.handle(Tick()) == []
    assert driver.machine.next_wake_s() == said_s + allowed_s


def test_started_request_fails_without_room_for_the_rest():
    driver = in_stage("answering", "p0", "d0", prefill_backlog_tokens=1, queue_timeout_s=30.0)
    driver.ask("b")
    # b has been placed on the prefill worker meanwhile
    driver.say("d0", GivenBack("r.0", "preempted"))
    assert driver.machine.queue_len == 1
    driver.say("p0", PrefillStarted("b.0", 0, LEASE), after_s=20)
    assert deadline_of(driver) == 10.0
    driver.now_s += 10
    effects = driver.handle(Tick())
    assert ends(effects) == [Failed("no worker had room in time")]
    assert driver.machine.num_flights == 1


def test_without_requests_there_is_no_deadline():
    driver = in_stage("decoding")
    driver.handle(ClientGone(RequestId("r")))
    assert driver.machine.next_wake_s() is None
    assert driver.handle(Tick()) == []


# ---------------------------------------------------------------- other messages

REPORT = LoadReport(1, 2, 3, 4, 5, 6, 7, 8)


def test_a_load_report_is_kept_with_its_worker():
    driver = Driver("p0", "d0")
    assert driver.say("d0", REPORT) == []
    assert driver.machine.view.workers["d0"].load == REPORT
    assert driver.machine.view.workers["p0"].load is None


def test_a_load_report_of_a_lost_worker_is_ignored():
    driver = Driver("p0")
    assert driver.handle(FromWorker("d0", REPORT)) == []


def test_handshake_messages_are_ignored():
    driver = in_stage("decoding")
    welcome = driver.machine.view.workers["d0"].info
    assert welcome.version == PROTOCOL_VERSION
    assert driver.say("d0", welcome) == []
    assert driver.say("d0", Refused("why not")) == []


def test_impossible_request_is_not_retried():
    driver = in_stage("sent")
    effects = driver.say("p0", GivenBack("r.0", "grammar: too costly", hopeless=True))
    [outcome] = ends(effects)
    assert outcome == Failed("grammar: too costly", UNFIT)


# ---------------------------------------------------------------- steps that never finish


def test_step_deadline_is_a_multiple_of_the_prediction_above_a_bound():
    driver = Driver("p0", "d0", stuck_step_s=5.0, progress_timeout_s=60.0)
    machine, workers = driver.machine, driver.machine.view.workers
    assert machine.longest_step_s("p0") == 60.0  # p0 computes nothing for this gateway
    driver.ask()
    assert machine.longest_step_s("p0") == 60.0  # no prompt has been measured
    driver.hand_over()
    assert machine.longest_step_s("d0") == 60.0  # no step has been measured
    machine.state.estimates.observe_steps(workers["d0"], [StepReport(0.1, num_rows=1)])
    assert machine.longest_step_s("d0") == 5.0
    machine.state.estimates.observe_steps(workers["d0"], [StepReport(1.0, num_rows=1)] * 100)
    assert machine.longest_step_s("d0") == pytest.approx(20.0, rel=0.01)
    assert machine.longest_step_s("p0") == 60.0  # p0 has finished its prompt
    assert machine.longest_step_s("unknown") == 60.0


def test_first_steps_may_take_ten_times_the_bound_within_the_progress_timeout():
    driver = Driver("p0", "d0", stuck_step_s=5.0, progress_timeout_s=60.0)
    machine, workers = driver.machine, driver.machine.view.workers
    driver.ask()
    driver.hand_over()
    assert machine.longest_step_s("d0", is_early=True) == 60.0  # no step has been measured
    machine.state.estimates.observe_steps(workers["d0"], [StepReport(0.1, num_rows=1)])
    assert machine.longest_step_s("d0", is_early=True) == 50.0


@pytest.mark.parametrize("stage", ["sent", "answering"])
def test_attempts_lost_to_a_hung_step_count_only_beyond_a_number(stage):
    driver = in_stage(stage, max_attempts=1)
    victims = ["p0", "p1"] if stage == "sent" else ["d0", "d1"]
    assert not ends(driver.handle(WorkerLost(victims[0], "StepStuck")))
    driver.join(victims[0])
    [outcome] = ends(driver.handle(WorkerLost(victims[1], "StepStuck")))
    assert outcome == Failed("given up after 2 attempts; the last one: worker lost")
    assert is_idle(driver)
