"""Refusals of new requests, their `Retry-After`, and two pools under twice their load."""

import random
from collections import Counter
from statistics import mean, pstdev

import msgspec
import pytest

from bench.simulator.cluster import SimulatedPools, SimulatedRequest, SimulationSetup, simulate
from bench.simulator.hardware import HardwareProfile
from bench.simulator.traces import Trace, TraceRequest
from engine.config import RouterConfig, RouterPolicy
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    LeaseRef,
    Limits,
    RequestId,
    Role,
    RoleChanged,
    Sampling,
    TransferAddress,
    Welcome,
)
from engine.worker.blocks import hash_blocks
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.admission import Admission, DecodeLoad
from router.machine.events import Arrived, FromWorker, Tick, WorkerJoined
from router.machine.machine import RouterMachine
from router.machine.requests import Rejected, Request, Update

LAYOUT = KVLayout(block_size=16, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
LEASE = LeaseRef("lease", TransferAddress("p0", "inc", "tcp://x"), 2)
PROMPT_LEN, NUM_TOKENS = 100, 100
# a prompt takes a second; a step takes 10 ms plus 1 ms for each sequence
COSTS = WorkerCosts(PrefillCost(0.0, 0.01), DecodeCost(0.01, 0.001, 0.0), PullCost(0.0, 0.0, 1e12))


def welcome(
    name: str, num_blocks: int = 10_000, max_running: int = 1000, *, stretch: float | None = None
) -> WorkerJoined:
    role = Role.PREFILL if name[0] == "p" else Role.DECODE
    info = Welcome(PROTOCOL_VERSION, name, "inc", role, "fp", LAYOUT, num_blocks, max_running)
    return WorkerJoined(msgspec.structs.replace(info, stretch=stretch))


def arrival(name: str, now_s: float, *, max_tokens: int = NUM_TOKENS, **fields) -> Arrived:
    limits = Limits(PROMPT_LEN + max_tokens)
    prompt = tuple(range(int(1000 * now_s), int(1000 * now_s) + PROMPT_LEN))
    return Arrived(Request(RequestId(name), prompt, Sampling(), limits, now_s, **fields))


def machine(*workers: WorkerJoined, estimates=None, **config) -> RouterMachine:
    made = RouterMachine(RouterConfig(**config), estimates=estimates or Estimates(COSTS))
    for worker in workers:
        made.handle(worker, 0.0)
    return made


def refused(effects) -> list[Rejected]:
    return [e.outcome for e in effects if isinstance(e, Update) and isinstance(e.outcome, Rejected)]


# ---------------------------------------------------------------- single decisions


def test_predicted_late_request_is_refused_with_retry_after():
    router = machine(welcome("p0"), welcome("d0"), slo_ttft_s=3.0)
    for number in range(3):  # one second of prefill each
        assert not refused(router.handle(arrival(f"r{number}", 0.1 * number), 0.0))
    [outcome] = refused(router.handle(arrival("late", 0.5), 0.5))
    # after half a second, 2.5 s of work remain; with its own second the prompt is half a second
    # late
    assert outcome.retry_after_s == 1.0  # the minimum of `Retry-After`
    assert "3.5 s" in outcome.message
    assert router.counters["rejected", "first token late"] == 1
    assert not refused(router.handle(arrival("again", 1.1), 1.1))
    router.validate()


def test_cached_prefix_shortens_the_predicted_wait():
    router = machine(welcome("p0"), welcome("p1"), welcome("d0"), slo_ttft_s=0.5)
    event = arrival("r", 0.0)
    assert refused(router.handle(event, 0.0))
    router.prefixes.record("d0", hash_blocks(event.request.token_ids, LAYOUT.block_size))
    assert not refused(router.handle(event, 0.0))


def test_prompt_does_not_wait_if_a_decode_worker_has_time_for_it():
    router = machine(welcome("p0"), welcome("d0"), slo_ttft_s=3.0, slo_tpot_s=2.0)
    for number in range(3):
        router.handle(arrival(f"r{number}", 0.1 * number), 0.0)
    assert refused(router.handle(arrival("others", 0.5), 0.5))
    router.handle(welcome("d1", stretch=4.0), 0.5)
    assert not refused(router.handle(arrival("local", 0.6), 0.6))
    assert refused(router.handle(arrival("late", 0.7), 0.7))
    router.validate()


def test_without_prefill_workers_local_prefillers_count():
    router = machine(welcome("p0"), welcome("d0", stretch=4.0), slo_ttft_s=1.5)
    router.handle(FromWorker("p0", RoleChanged(Role.DRAINED)), 0.0)
    assert not refused(router.handle(arrival("a", 0.0), 0.0))
    assert refused(router.handle(arrival("b", 0.1), 0.0))
    router.validate()


def test_bounds_of_a_request_override_the_routers():
    router = machine(welcome("p0"), welcome("d0"))
    assert refused(router.handle(arrival("a", 0.0, deadline_s=0.5), 0.0))
    assert refused(router.handle(arrival("b", 0.0, deadline_s=0.5, tpot_bound_s=0.02), 0.0))
    assert not refused(router.handle(arrival("c", 0.0, deadline_s=1.5), 0.0))
    router.handle(arrival("d", 0.1), 0.0)
    assert refused(router.handle(arrival("e", 0.2, tpot_bound_s=0.0115), 0.0))
    assert router.counters["rejected", "tokens slow"] == 1


def test_a_bound_on_tokens_holds_up_no_answer_of_one_token():
    router = machine(welcome("p0"), welcome("d0"), slo_tpot_s=0.0115)
    router.handle(arrival("a", 0.0), 0.0)
    assert refused(router.handle(arrival("b", 0.1), 0.1))
    router.handle(arrival("c", 0.2, max_tokens=1), 1.5)
    assert router.state.flights["c"].attempt is not None


def test_what_a_prefill_worker_could_decode_in_time_is_not_refused():
    router = machine(welcome("p0", stretch=4.0), welcome("d0"), slo_tpot_s=0.0115)
    router.handle(arrival("a", 0.0), 0.0)
    router.handle(arrival("b", 0.1), 0.1)
    assert "b" in router.state.flights


def test_without_bound_or_prediction_no_request_is_refused_early():
    for router in (
        machine(welcome("p0"), welcome("d0")),
        machine(welcome("p0"), welcome("d0"), estimates=Estimates(), slo_ttft_s=1e-3),
    ):
        for number in range(20):
            assert not refused(router.handle(arrival(f"r{number}", number / 9), 0.0))


def test_deadline_ends_the_wait_in_the_queue():
    router = machine(welcome("p0"), welcome("d0"), estimates=Estimates(), prefill_backlog_tokens=1)
    router.handle(arrival("first", 0.0), 0.0)
    router.handle(arrival("second", 0.0, deadline_s=2.0), 0.0)
    assert router.next_wake_s() == 2.0
    assert refused(router.handle(Tick(), 2.0))
    assert router.num_flights == 1


def test_full_queue_returns_the_predicted_time_until_half_of_it_is_placed():
    router = machine(welcome("p0"), welcome("p1"), welcome("d0"), max_queue=6)
    for number in range(8):  # two requests are placed, six wait
        assert not refused(router.handle(arrival(f"r{number}", number / 9), 0.0))
    [outcome] = refused(router.handle(arrival("late", 1.0), 0.0))
    assert outcome.retry_after_s == pytest.approx(8.0 / 2 / 2)


def test_prediction_includes_the_wait_for_memory():
    # 13 blocks hold one sequence, which takes one second of prefill and a hundred steps of 11 ms
    router = machine(welcome("p0"), welcome("d0", num_blocks=13), slo_ttft_s=2.5)
    assert not refused(router.handle(arrival("r", 0.0), 0.0))
    [outcome] = refused(router.handle(arrival("late", 0.5), 0.5))
    assert "2.6 s" in outcome.message  # memory is free after 2.1 s, then one second of prefill
    assert not refused(router.handle(arrival("later", 0.7), 0.7))


# ---------------------------------------------------------------- two pools at twice their load


class Late(Admission):
    """Predicts with the present decode load, and ignores prompts that are still in prefill."""

    def load_at(self, decoders, at_s: float, now_s: float) -> DecodeLoad:
        there = sum(c.num_tokens > 0 for worker in decoders for c in worker.decodes.values())
        return DecodeLoad(there / len(decoders), 0.0)


TTFT_S, TPOT_S = 5.0, 0.030
# a prompt takes two seconds; ten sequences per decode worker keep the TPOT: 7 requests/s
SLOW = HardwareProfile(
    name="slow",
    source="made up",
    layout=LAYOUT,
    num_blocks=10_000,
    prefill=PrefillCost(0.0, 0.02),
    decode=DecodeCost(0.01, 0.002, 0.0),
    pull=COSTS.pull,
)
RATE_PER_S = 13.5
DURATION_S, WARM_S, WINDOW_S = 60, 24, 2  # seconds; answer lengths are learned during WARM_S


def overload(admission: type[Admission]) -> list[SimulatedRequest]:
    """Returns requests with their results, by arrival. The policy itself enforces no bounds."""
    rng = random.Random(1)
    policy = RouterPolicy.LEAST_LOADED
    config = RouterConfig(policy=policy, slo_ttft_s=TTFT_S, slo_tpot_s=TPOT_S)
    estimates = Estimates(WorkerCosts(SLOW.prefill, SLOW.decode, SLOW.pull))
    router = RouterMachine(config, estimates=estimates)
    router._admission = admission(router.state)
    lengths = [min(int(rng.expovariate(1 / 100)) + 2, 400) for _ in range(810)]
    requests = [TraceRequest(i / RATE_PER_S, PROMPT_LEN, n) for i, n in enumerate(lengths)]
    setup = SimulationSetup(SLOW, SimulatedPools(28, 2), max_answer_tokens=400)
    return simulate(Trace("overload", 16, tuple(requests)), setup, router).records


def let_in(records: list[SimulatedRequest]) -> list[SimulatedRequest]:
    return [record for record in records if not isinstance(record.outcome, Rejected)]


def admitted(records: list[SimulatedRequest]) -> list[int]:
    """Counts the admitted requests in each window."""
    counts = Counter(int(record.asked.arrived_s / WINDOW_S) for record in let_in(records))
    return [counts[window] for window in range(WARM_S // WINDOW_S, DURATION_S // WINDOW_S)]


def goodput(records: list[SimulatedRequest]) -> int:
    """Counts the answers within their bounds."""
    return sum(
        record.times_s[0] - record.asked.arrived_s <= TTFT_S
        and record.times_s[-1] - record.times_s[0] <= 1.1 * TPOT_S * (len(record.times_s) - 1)
        for record in let_in(records)
    )


def test_cluster_under_twice_its_load_admits_a_steady_rate_and_keeps_bounds():
    early, late = overload(Admission), overload(Late)
    steady, waves = admitted(early), admitted(late)
    assert 11.0 < mean(steady) < 15.0  # 27 arrive in a window; capacity is 13
    assert pstdev(steady) < 0.4 * mean(steady)  # random answer lengths alone give 0.28
    assert pstdev(steady) < 0.5 * pstdev(waves)
    assert goodput(early) >= goodput(late)
    assert goodput(early) / len(let_in(early)) > goodput(late) / len(let_in(late))
