"""Recordings, profiles fitted to recordings, shared cores, and the comparison."""

import asyncio
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.lab.validation.fitting import Fitted, TooFewSamples, WorkerLimits, _runs, fit
from bench.lab.validation.live import DeploymentFailed, _ask_all
from bench.lab.validation.recordings import (
    DecodeStep,
    RecordedAttempt,
    RecordedRequest,
    RecordedRun,
    read_run,
)
from bench.lab.validation.study import GOALS, SplitComparison, ValidationLoad, made, results_of
from bench.simulator.crowd import NO_CHANCES, Chances, Crowd
from bench.simulator.hardware import HardwareProfile, StepPrice
from bench.simulator.traces import Trace, TraceError, TraceRequest, read_trace
from bench.simulator.transfers import Future, Rank
from engine.clock import MonotonicClock
from engine.config import RouterConfig
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    DecodeStarted,
    FinishReason,
    KvReady,
    LeaseRef,
    Limits,
    PrefillDone,
    PrefillStarted,
    Role,
    Sampling,
    Tokens,
    TransferAddress,
    Welcome,
)
from engine.worker.costs import PrefillCost, PullCost
from router.machine.events import Arrived, ClientGone, FromWorker, Stepped, WorkerJoined
from router.machine.machine import RouterMachine
from router.machine.requests import Request
from router.recording.records import Recorded, Recorder
from tests.kits.router.recordings import recorded

LAYOUT = KVLayout(4, KVFormat.FP32, (KVSection(6, 2, 64),))
LIMITS = WorkerLimits(max_batch_tokens=512, chunk_tokens=256)
PREFILL, DECODE = PrefillCost(1e-3, 6e-5, 5e-8), DecodeCost(4e-4, 3e-4, 1e-6)
HARDWARE = HardwareProfile("h", "made up", LAYOUT, 100, PREFILL, DECODE, PullCost(0.0, 0.0, 1e9))
LATENCY_S, PULL_S = 2e-3, 4e-3


def welcome(name: str, role: Role) -> Welcome:
    return Welcome(PROTOCOL_VERSION, name, "inc", role, "fp", LAYOUT, 100, 4)


# ---------------------------------------------------------------- recordings


def request(name: str, prompt, max_tokens: int) -> Request:
    limits = Limits(len(prompt) + max_tokens)
    return Request(name, tuple(prompt), Sampling(), limits, 1.0)


def handed_over(name: str, at_s: float, tokens: int, *, finish: bool):
    """Yields the workers' messages of one request that is handed over, with a token every 10 ms."""
    seq_id = f"{name}.0"
    lease = LeaseRef(seq_id, TransferAddress("p0", "inc", "tcp://nowhere"), 2)
    yield at_s + 0.01, "p0", PrefillStarted(seq_id, 4, lease)
    yield at_s + 0.05, "p0", PrefillDone(seq_id, 7, None)
    yield at_s + 0.06, "d0", KvReady(seq_id, 2, 0, "shm", 0.1, 0.05)
    yield at_s + 0.07, "d0", DecodeStarted(seq_id)
    for i in range(tokens - 1):
        last = FinishReason.LENGTH if finish and i == tokens - 2 else None
        yield at_s + 0.08 + i / 100, "d0", Tokens(seq_id, [8], last)


def told_of_worker(worker: str, message):
    """Returns the event that the router's shell makes from a worker's message."""
    if isinstance(message, Tokens):
        return Stepped(worker, [message])
    return FromWorker(worker, message)


def recording() -> list[bytes]:
    """Returns a recording of two answered requests, a cancelled one, and one that is never
    answered."""
    events = [
        (0.5, WorkerJoined(welcome("p0", Role.PREFILL))),
        (0.5, WorkerJoined(welcome("d0", Role.DECODE))),
    ]
    asked = {"a": range(9), "b": [*range(8), 99], "left": range(20, 25)}
    for at_s, (name, prompt) in zip((1.0, 2.0, 3.0), asked.items(), strict=True):
        events.append((at_s, Arrived(request(name, prompt, 5))))
        told = handed_over(name, at_s, 4 if name == "left" else 5, finish=name != "left")
        events += [(told_s, told_of_worker(worker, message)) for told_s, worker, message in told]
    events += [(3.5, ClientGone("left")), (4.0, Arrived(request("waits", [1], 6)))]
    config = RouterConfig(seed=1)
    lines: list[bytes] = []
    machine, recorder = RouterMachine(config), Recorder(config, lines.append)
    for now_s, event in events:
        recorder.record(event, now_s, machine.handle(event, now_s))
    return lines


def test_recording_holds_the_times_of_a_request():
    told = read_run(recording())
    assert set(told.workers) == {"p0", "d0"}
    first = told.asked["a"]
    assert first.is_finished
    assert first.times_s == pytest.approx([1.05, 1.08, 1.09, 1.10, 1.11])
    attempt = told.attempts["a.0"]
    assert (attempt.num_tokens, attempt.num_cached_tokens) == (9, 4)
    assert (attempt.prefill_worker, attempt.decode_worker) == ("p0", "d0")
    assert attempt.hands_over
    times_s = attempt.sent_s, attempt.started_s, attempt.done_s
    assert times_s == pytest.approx((1.0, 1.01, 1.05))
    assert (attempt.ready_s, attempt.decode_started_s) == pytest.approx((1.06, 1.07))
    assert (told.asked["left"].is_finished, told.asked["left"].client_left) == (False, True)


def test_decode_step_counts_context_tokens():
    steps = read_run(recording()).steps["d0"]
    assert [step.num_context for step in steps[:4]] == [10, 11, 12, 13]
    assert [bool(step.finished) for step in steps[:4]] == [False, False, False, True]


def test_tokens_of_one_frame_are_one_step():
    asked = {
        name: RecordedRequest(request(name, range(size), 5), 1.0)
        for name, size in (("a", 3), ("b", 7))
    }
    told = RecordedRun(
        asked, {f"{name}.0": RecordedAttempt(f"{name}.0", 9, True, "p0", 1.0) for name in asked}
    )
    tokens = [Tokens("a.0", [8]), Tokens("b.0", [8], FinishReason.STOP)]
    told.note(Recorded(2.0, Stepped("d0", tokens), ()))
    assert told.steps == {"d0": [DecodeStep(2.0, {"a.0": 3, "b.0": 7}, {"b.0"})]}


def test_a_recording_is_read_as_a_trace(tmp_path):
    path = tmp_path / "gateway.msgpack"
    path.write_bytes(b"".join(recording()))
    trace = read_trace(path)
    assert trace.block_tokens == LAYOUT.block_size
    a, b, left, waits = trace.requests
    assert a == TraceRequest(0.0, 9, 5, a.block_ids)
    assert a.block_ids[:2] == b.block_ids[:2]  # the first eight tokens are equal
    assert len({*a.block_ids, *b.block_ids, *left.block_ids, *waits.block_ids}) == 3 + 1 + 2 + 1
    # output tokens received before the cancellation
    assert (left.arrived_s, left.output_len) == (2.0, 4)
    assert waits.output_len == 6  # output tokens that were requested


def test_broken_recording_is_an_error_with_its_record(tmp_path):
    path = tmp_path / "gateway.msgpack"
    path.write_bytes(recorded()[0] + b"\x80")
    with pytest.raises(TraceError, match="record 2"):
        read_trace(path)


# ---------------------------------------------------------------- live requests


class Silent:
    """A router that never answers a request, or fails on one."""

    def __init__(self, dies_of: str | None = None) -> None:
        self.num_asked = self.num_left = 0
        self._dies_of = dies_of

    def submit(self, request, sink):
        self.num_asked += 1
        if request.request_id == self._dies_of:
            raise AssertionError("a bug")
        return self

    def cancel(self):
        self.num_left += 1


TWO = Trace("two", 4, (TraceRequest(0.0, 1, 1, (1,)), TraceRequest(0.001, 1, 1, (2,))))


async def asked_and_left(router: Silent) -> None:
    """Sends requests, and asserts that no task is left."""
    requests = [request(name, [1], 1) for name in "ab"]
    try:
        await _ask_all(router, requests, TWO, MonotonicClock())
    finally:
        assert asyncio.all_tasks() == {asyncio.current_task()}


def test_unanswered_requests_time_out(monkeypatch):
    monkeypatch.setattr("bench.lab.validation.live.ANSWER_TIMEOUT_S", 0.05)
    router = Silent()
    with pytest.raises(DeploymentFailed, match="not all requests were answered"):
        asyncio.run(asked_and_left(router))
    assert router.num_left == router.num_asked > 0


def test_failure_of_one_request_cancels_the_others():
    router = Silent(dies_of="b")
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(asked_and_left(router))
    assert failed.group_contains(AssertionError, match="a bug")
    assert (router.num_asked, router.num_left) == (2, 1)


# ---------------------------------------------------------------- fitted profiles


def told_of(*, num_others: int = 0, slower: float = 1.0) -> RecordedRun:
    """Returns a run with the costs of HARDWARE. Every second prompt runs beside busy workers."""
    told = RecordedRun(
        workers={"p0": welcome("p0", Role.PREFILL), "d0": welcome("d0", Role.DECODE)}
    )
    rng = Random(3)
    at_s = 0.0
    for i in range(60):
        num_tokens, num_cached = rng.randrange(300, 1500), rng.randrange(0, 200)
        chunks = -(-(num_tokens - num_cached) // LIMITS.chunk_tokens)
        seconds = PREFILL.seconds(num_tokens, num_cached) + (chunks - 1) * PREFILL.fixed_s
        attempt = RecordedAttempt(f"{i}.0", num_tokens, True, "p0", at_s, "d0", num_cached)
        attempt.started_s = at_s + 2 * LATENCY_S
        attempt.done_s = attempt.started_s + seconds * (slower if i % 2 else 1.0)
        attempt.ready_s = attempt.done_s + PULL_S
        told.attempts[attempt.seq_id] = attempt
        if i % 2:
            for other in range(num_others):
                told.steps.setdefault(f"o{other}", []).extend(
                    busy_step(name, stamp_s, last=stamp_s == attempt.done_s)
                    for name, stamp_s in (("x", attempt.started_s), ("x", attempt.done_s))
                )
        at_s = attempt.done_s + 0.5
    told.steps |= {} if num_others else {"d0": decode_steps(rng)}
    return told


def busy_step(name: str, at_s: float, *, last: bool) -> DecodeStep:
    return DecodeStep(at_s, {name: 1}, {name} if last else set())


def decode_steps(rng: Random) -> list[DecodeStep]:
    steps, at_s = [], 0.0
    for _ in range(40):
        rows = {str(i): rng.randrange(20, 900) for i in range(rng.randrange(1, 6))}
        for i in range(20):
            rows = {name: length + 1 for name, length in rows.items()}
            at_s += DECODE.seconds(len(rows), sum(rows.values()))
            steps.append(DecodeStep(at_s, rows, set(rows) if i == 19 else set()))
        at_s += 0.3
    return steps


def test_fit_finds_the_costs_of_steps_messages_and_pulls():
    fitted = fit([told_of()], LIMITS, name="found")
    found = fitted.hardware
    assert fitted.latency_s == pytest.approx(LATENCY_S)
    assert found.pull.seconds(9, 9000) == pytest.approx(PULL_S)
    assert found.prefill.seconds(900) == pytest.approx(PREFILL.seconds(900), rel=0.01)
    assert found.prefill.square_s == pytest.approx(PREFILL.square_s, rel=0.02)
    assert found.decode.seconds(1, 100) == pytest.approx(DECODE.seconds(1, 100), rel=0.01)
    assert found.decode.context_s == pytest.approx(DECODE.context_s, rel=0.02)
    assert found.cores is None


@pytest.mark.parametrize(("num_others", "slower"), [(1, 1.0), (2, 1.5), (3, 2.0)])
def test_fit_removes_the_effect_of_shared_cores(num_others, slower):
    told = told_of(num_others=num_others, slower=slower)
    told.steps["d0"] = decode_steps(Random(4))
    after_s = told.attempts["59.0"].done_s + 1  # no other worker is busy at this time
    for step in told.steps["d0"]:
        step.at_s += after_s
    fitted = fit([told], LIMITS, name="found", cores=2)
    found = fitted.hardware
    assert found.prefill.seconds(900) == pytest.approx(PREFILL.seconds(900), rel=0.02)
    assert min(fitted.chances.prefill) == pytest.approx(max(fitted.chances.prefill), rel=0.1)
    assert (found.cores, found.gateway_load) == (2, 0.0)


def test_gateway_cpu_is_spread_over_decoding_time():
    told = told_of()
    after_s = told.attempts["59.0"].done_s + 1  # no other worker is busy at this time
    for step in told.steps["d0"]:
        step.at_s += after_s
    alone = fit([told], LIMITS, name="found", cores=1).hardware
    told.gateway_cpu_s = sum(run[-1].at_s - run[0].at_s for run in _runs(told.steps["d0"])) / 4
    found = fit([told], LIMITS, name="found", cores=1).hardware
    assert found.gateway_load == pytest.approx(0.25)
    assert found.decode.seconds(3, 900) == pytest.approx(alone.decode.seconds(3, 900) / 1.25)
    assert found.prefill == alone.prefill


def test_decode_steps_beside_a_local_prompt_are_left_out():
    told = told_of()
    clean = fit([told], LIMITS, name="found").hardware
    steps = told.steps["d0"]
    local = RecordedAttempt("local.0", 500, False, "d0", steps[100].at_s)
    local.started_s, local.done_s = steps[100].at_s, steps[101].at_s + 5
    for step in steps[101:]:
        step.at_s += 5
    told.attempts["local.0"] = local
    found = fit([told], LIMITS, name="found").hardware
    assert found.prefill.seconds(900) == pytest.approx(clean.prefill.seconds(900))
    assert found.decode.seconds(3, 900) == pytest.approx(clean.decode.seconds(3, 900), rel=0.01)


def test_recordings_with_too_few_samples_are_refused():
    with pytest.raises(TooFewSamples, match="no worker"):
        fit([], LIMITS, name="found")
    with pytest.raises(TooFewSamples, match="prompts"):
        fit([read_run(recording())], LIMITS, name="found")


class Crowded:
    """Workers on shared cores whose steps start at given times; `ends_s` has the end times."""

    def __init__(self, chances: Chances = NO_CHANCES, **shared: float) -> None:
        self.future = Future()
        self.crowd = Crowd(replace(HARDWARE, **shared), self.future, chances)
        self.ends_s: dict[str, float] = {}
        self.all_ends_s: list[float] = []

    def run(self, *steps: tuple[float, str, StepPrice, float]) -> dict[str, float]:
        """Runs steps of (start, worker, cost, seconds of work)."""
        for step in steps:
            self.future.plan(step[0], Rank.MESSAGE, self._begin, step)
        self.future.run()
        return self.ends_s

    def _begin(self, step: tuple[float, str, StepPrice, float]) -> None:
        _, name, price, seconds = step
        self.crowd.start(name, price, seconds, lambda: self._end(name))

    def _end(self, name: str) -> None:
        self.ends_s[name] = self.future.now_s
        self.all_ends_s.append(self.future.now_s)


CHUNK, STEP = StepPrice(num_new=9), StepPrice(num_rows=1)


def test_workers_share_cores_while_there_are_too_few():
    crowded = Crowded(cores=2)
    ends_s = crowded.run((0.0, "a", CHUNK, 1.0), (0.0, "b", STEP, 2.0), (0.5, "c", CHUNK, 1.0))
    # three on two cores from 0.5 s on: a ends first, then the other two have one core each
    assert ends_s == pytest.approx({"a": 1.25, "c": 1.75, "b": 2.25})


def test_decoding_worker_keeps_the_gateway_busy():
    ends_s = Crowded(cores=2, gateway_load=0.5).run((0.0, "a", STEP, 1.0), (0.0, "b", CHUNK, 1.0))
    assert ends_s == {"a": pytest.approx(1.25), "b": pytest.approx(1.25)}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 2)), min_size=2, max_size=9))
def test_shared_cores_do_all_work_without_idling(begins_and_work):
    steps = [(at_s, str(i), CHUNK, work_s) for i, (at_s, work_s) in enumerate(begins_and_work)]
    ends_s = Crowded(cores=2).run(*steps)
    began_s = sorted(at_s for at_s, *_ in steps)
    # one core until the second start, two until only one step runs, and then one again
    last, but_one = sorted(ends_s.values(), reverse=True)[:2]
    cores_s = 2 * (but_one - began_s[1]) + (began_s[1] - began_s[0]) + (last - but_one)
    assert cores_s == pytest.approx(sum(seconds for *_, seconds in steps))


# ---------------------------------------------------------------- loads and results


def test_made_load_has_its_rate_lengths_and_prefixes():
    load = ValidationLoad(5.0, 400, input_tokens=300, output_tokens=32, share_with_prefix=0.25)
    ids = count()
    trace, again = made(load, Random(1), ids), made(load, Random(1), ids)
    assert len(trace.requests) == 400
    assert trace.duration_s == pytest.approx(80.0, rel=0.15)
    shapes = [
        [(r.arrived_s, r.input_len, r.output_len) for r in t.requests] for t in (trace, again)
    ]
    assert shapes[0] == shapes[1]
    blocks = [{i for r in t.requests for i in r.block_ids} for t in (trace, again)]
    assert not blocks[0] & blocks[1]  # no block of one trace can be cached for the other
    firsts = [r.block_ids[0] for r in trace.requests]
    assert 0.15 < sum(firsts.count(i) > 1 for i in firsts) / len(firsts) < 0.35
    for one in trace.requests:
        assert len(one.block_ids) == -(-one.input_len // trace.block_tokens)


def test_results_hold_both_figures_and_the_error():
    measured = [{"ttft": [1.0, 3.0], "tpot": [0.1]}, {"ttft": [2.0, 4.0], "tpot": [0.3]}]
    simulated = [{"ttft": [ttft_s], "tpot": [0.22]} for ttft_s in (1.0, 2.0, 9.0)]
    compared = SplitComparison((1, 1), Fitted(HARDWARE, 0.0), measured, simulated)
    values = {result.name: result.value for result in results_of(compared)}
    assert values["validation/1+1/ttft_mean/measured"] == pytest.approx(2500)
    assert values["validation/1+1/ttft_mean/simulated"] == pytest.approx(2000)
    assert values["validation/1+1/ttft_mean"] == pytest.approx(0.2)
    assert values["validation/1+1/tpot_p99"] == pytest.approx(0.1)
    # 2 s and 3 s: 2 is a third less than 3, and 3 is half as much again as 2
    assert values["validation/1+1/ttft_mean/spread"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert GOALS.bound("validation/1+1/ttft_mean") == 0.10
    assert GOALS.bound("validation/2+2/tpot_p99") == 0.20
    assert GOALS.bound("validation/2+2/tpot_p50") is None
    assert GOALS.bound("validation/2+2/tpot_p99/measured") is None
