"""Predictions of worker times, and how many observations they need."""

from math import inf, nan

import pytest
from msgspec.structs import replace

from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, LoadReport, Role, StepReport, Welcome, WorkerId
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import (
    ENOUGH,
    FIRST_LOADS,
    FIRST_PULL_BYTES_PER_S,
    PULL_OVERHEAD_S,
    Estimates,
    Rate,
)
from router.cluster.view import WorkerView

BLOCK = 4
LAYOUT = KVLayout(block_size=BLOCK, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))


def view(name: str, role: Role, num_blocks: int = 100) -> WorkerView:
    info = Welcome(PROTOCOL_VERSION, name, "life", role, "fp", LAYOUT, num_blocks, 4)
    return WorkerView(info)


P0, P1, LARGE = (view("p0", Role.PREFILL), view("p1", Role.PREFILL), view("p2", Role.PREFILL, 1000))
D0 = view("d0", Role.DECODE)


def test_a_rate_is_unknown_until_it_was_measured():
    rate = Rate()
    rate.observe(0, 1.0)
    assert rate.s_per_unit is None
    rate.observe(4, 1.0)
    assert rate.s_per_unit == 0.25


def test_rate_follows_recent_measurements():
    rate = Rate()
    for _ in range(20):
        rate.observe(10, 1.0)
    assert rate.s_per_unit == pytest.approx(0.1)
    for _ in range(40):
        rate.observe(10, 2.0)
    assert rate.s_per_unit == pytest.approx(0.2, rel=0.02)


def first_pull_s(worker, num_tokens):
    num_bytes = num_tokens // BLOCK * worker.info.layout.block_bytes
    return PULL_OVERHEAD_S + num_bytes / FIRST_PULL_BYTES_PER_S


def test_a_pull_is_guessed_until_one_was_seen():
    estimates = Estimates()
    assert estimates.pull_s(P0, 100 * BLOCK) == pytest.approx(first_pull_s(P0, 100 * BLOCK))
    estimates.observe_pull(D0, 10, seconds=10.0)
    assert estimates.pull_s(P0, 10 * BLOCK) == pytest.approx(PULL_OVERHEAD_S + 10.0)


def store_with(**gauges: float) -> WorkerView:
    store = WorkerView(replace(P0.info, worker_id=WorkerId("store-1"), role=Role.STORE))
    named = {name.replace("__", ":"): value for name, value in gauges.items()}
    store.report(LoadReport(*(0,) * 8, gauges=named), 1.0)
    return store


def test_a_store_says_how_long_it_takes_to_read():
    store = store_with(load_fixed_s__disk=0.5, load_block_s__disk=0.25)
    assert Estimates().load_s(store, "disk", 4) == pytest.approx(1.5)


@pytest.mark.parametrize(
    "gauges",
    [
        {},
        {"load_fixed_s__disk": 1.0},
        {"load_fixed_s__disk": nan, "load_block_s__disk": 1.0},
        {"load_fixed_s__disk": 1.0, "load_block_s__disk": -1.0},
        {"load_fixed_s__disk": 1.0, "load_block_s__disk": inf},
        {"load_fixed_s__object": 1.0, "load_block_s__object": 1.0},
    ],
)
def test_reads_are_guessed_until_a_store_has_measured_them(gauges):
    fixed_s, bytes_per_s = FIRST_LOADS["disk"]
    expected_s = fixed_s + 4 * P0.info.layout.block_bytes / bytes_per_s
    assert Estimates().load_s(store_with(**gauges), "disk", 4) == pytest.approx(expected_s)


def test_nothing_is_predicted_before_anything_was_seen():
    estimates = Estimates()
    assert estimates.prefill_s(P0, 100, 0) is None
    assert estimates.any_prefill_s(100) is None
    assert estimates.step_s(D0, 1, 100) is None


def test_the_first_prompt_is_a_rate_for_all_workers():
    estimates = Estimates()
    estimates.observe_prefill(P0, 120, num_cached=20, seconds=1.0)
    for worker in (P0, LARGE, D0):
        assert estimates.prefill_s(worker, 300, 100) == pytest.approx(2.0)
    assert estimates.any_prefill_s(200) == pytest.approx(2.0)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(20, 1.0), (120, 0.0)])
def test_no_work_and_no_time_say_nothing(num_tokens, seconds):
    estimates = Estimates()
    estimates.observe_prefill(P0, num_tokens, num_cached=20, seconds=seconds)
    estimates.observe_pull(D0, 0, seconds=1.0)
    estimates.observe_pull(D0, 4, seconds=0.0)
    assert estimates.prefill_s(P0, 100, 0) is None
    assert estimates.pull_s(P0, 100 * BLOCK) == pytest.approx(first_pull_s(P0, 100 * BLOCK))


def test_pull_costs_bytes_and_a_fixed_part():
    estimates = Estimates()
    estimates.observe_pull(D0, 10, seconds=0.1)
    assert estimates.pull_s(P0, 80) == pytest.approx(PULL_OVERHEAD_S + 0.2)


def test_prompts_of_many_lengths_teach_a_class_of_workers_the_formula():
    truth = PrefillCost(0.01, 1e-3, 1e-6)
    estimates = Estimates()
    for num_tokens in [100 * i for i in range(1, 2 * ENOUGH)]:
        seconds = truth.seconds(num_tokens, num_tokens // 4)
        estimates.observe_prefill(P0, num_tokens, num_cached=num_tokens // 4, seconds=seconds)
    for worker in (P0, P1):
        assert estimates.prefill_s(worker, 4000, 1000) == pytest.approx(
            truth.seconds(4000, 1000), rel=0.02
        )
    assert estimates.errors(P1).prefill < 0.3
    assert estimates.errors(LARGE).prefill is None


def test_prompts_of_one_length_do_not():
    estimates = Estimates()
    for _ in range(3 * ENOUGH):
        estimates.observe_prefill(P0, 100, num_cached=0, seconds=1.0)
    assert estimates.prefill_s(P0, 1000, 0) == pytest.approx(10.0)


def test_reported_steps_teach_the_costs_of_the_worker_s_class():
    truth = DecodeCost(0.01, 1e-4, 1e-6)
    estimates = Estimates()
    steps = [
        StepReport(
            truth.seconds(rows, 1000 * rows + 7 * rows**2), 0, 0, rows, 1000 * rows + 7 * rows**2
        )
        for rows in range(1, 40)
    ]
    estimates.observe_steps(D0, [StepReport(9.0, num_prefill_tokens=7, num_rows=1), *steps])
    assert estimates.step_s(D0, 20, 30_000) == pytest.approx(truth.seconds(20, 30_000), rel=0.02)


def test_steps_of_one_size_teach_how_long_a_step_is_and_nothing_of_contexts():
    estimates = Estimates()
    estimates.observe_steps(D0, [StepReport(9.0, num_prefill_tokens=7, num_rows=1)])
    assert estimates.step_s(D0, 1, 0) is None
    growing = [StepReport(0.01 + k * 1e-3, 0, 0, 1, 800 + k) for k in range(5)]
    estimates.observe_steps(D0, growing)
    assert estimates.step_s(D0, 1, 0) == estimates.step_s(D0, 9, 9000)
    assert estimates.step_s(D0, 1, 0) == pytest.approx(0.012, rel=0.1)


def test_prior_costs_hold_until_enough_is_measured():
    prior = WorkerCosts(PrefillCost(0.0, 0.5), DecodeCost(0.25, 0.0, 0.0), PullCost(1.0, 0.0, 1e9))
    estimates = Estimates(prior)
    assert estimates.prefill_s(P0, 3, 1) == 1.0
    assert estimates.any_prefill_s(4) == 2.0
    assert estimates.step_s(D0, 1, 1) == 0.25
    assert estimates.pull_s(D0, 4) == pytest.approx(1.0 + PULL_OVERHEAD_S, abs=1e-6)
    estimates.observe_prefill(P0, 100, num_cached=0, seconds=1.0)
    assert estimates.prefill_s(P0, 3, 1) == 1.0


def test_well_known_class_skips_observations():
    estimates = Estimates()
    taken = []
    estimates._online.observe_step = lambda worker_class, step: taken.append(step)
    for number in range(1000):
        estimates.observe_prefill(P0, 100 + number, num_cached=0, seconds=1.0)
    assert 150 < len(taken) < 250


def test_how_late_busy_workers_answer_is_learned():
    estimates = Estimates()
    for _ in range(60):
        estimates.observe_offer(0.4)
    assert estimates.offer_s() == pytest.approx(0.4, rel=0.01)


def test_forgotten_fit_is_not_relearned_from_one_length():
    """The square term explains one length as well as the linear term, but makes others ten times
    slower."""
    estimates = Estimates()
    for number in range(40):
        length = 64 if number % 2 else 768
        estimates.observe_prefill(P0, length, num_cached=0, seconds=0.001 * length)
    assert estimates.prefill_s(P0, 768, 0) == pytest.approx(0.768, rel=0.01)
    for _ in range(40):  # the worker has become three times slower
        estimates.observe_prefill(P0, 64, num_cached=0, seconds=0.003 * 64)
    assert estimates.prefill_s(P0, 768, 0) == pytest.approx(3 * 0.768, rel=0.1)
    for number in range(40):
        length = 64 if number % 2 else 768
        estimates.observe_prefill(P0, length, num_cached=0, seconds=0.02 + 0.003 * length)
    for length in (64, 768):
        truth_s = 0.02 + 0.003 * length
        assert estimates.prefill_s(P0, length, 0) == pytest.approx(truth_s, rel=0.1)
