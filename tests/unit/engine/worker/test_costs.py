import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.demand import DecodeCost
from engine.worker.costs import Fit, OnlineCosts, PrefillCost, PullCost, StepReport, WorkerCosts

FEW = settings(max_examples=25, deadline=None)
H200 = WorkerCosts(
    prefill=PrefillCost(3.4e-3, 4.9e-5, 8.4e-10),
    decode=DecodeCost(10.7e-3, 2.05e-5, 3.0e-8),
    pull=PullCost(1e-3, 5e-6, 80e9),
)
BLOCK_BYTES = 2**27


def prefill_step(rng, costs=H200, factor=1.0):
    cached = rng.choice((0, 512, 4096))
    length = cached + rng.randint(16, 8192)
    squares = length**2 - cached**2
    return StepReport(factor * costs.prefill.seconds(length, cached), length - cached, squares)


def decode_step(rng, costs=H200, factor=1.0):
    rows = rng.randint(1, 64)
    context = sum(rng.randint(100, 20_000) for _ in range(rows))
    seconds = factor * costs.decode.seconds(rows, context)
    return StepReport(seconds, num_rows=rows, num_context_tokens=context)


def learned(num, factor_of=lambda rng: 1.0, costs=H200, seed=0):
    rng, online = random.Random(seed), OnlineCosts()
    for _ in range(num):
        online.observe_step("w", prefill_step(rng, costs, factor_of(rng)))
        online.observe_step("w", decode_step(rng, costs, factor_of(rng)))
        blocks = rng.randint(1, 60)
        size = blocks * BLOCK_BYTES
        seconds = costs.pull.seconds(blocks, size) * factor_of(rng)
        online.observe_pull("w", num_blocks=blocks, num_bytes=size, seconds=seconds)
    return online


def worst(online, costs=H200):
    """Returns the largest relative error over the observed sizes."""
    known = online.costs("w")
    pairs = [(known.prefill.seconds(n, p), costs.prefill.seconds(n, p)) for n, p in PROMPTS]
    pairs += [(known.decode.seconds(b, kv), costs.decode.seconds(b, kv)) for b, kv in STEPS]
    pairs += [
        (known.pull.seconds(k, k * BLOCK_BYTES), costs.pull.seconds(k, k * BLOCK_BYTES))
        for k in (1, 8, 60)
    ]
    return max(abs(predicted / true - 1) for predicted, true in pairs)


PROMPTS = ((64, 0), (1024, 0), (8192, 0), (8192, 4096), (5000, 4096))
STEPS = ((1, 500), (8, 60_000), (64, 600_000))


def test_chunks_cost_the_prompt_and_a_fixed_part_each():
    cost = H200.prefill
    chunks = [cost.seconds(end, start) for start, end in ((0, 4000), (4000, 8000), (8000, 9000))]
    assert sum(chunks) == pytest.approx(cost.seconds(9000) + 2 * cost.fixed_s)


def test_nothing_observed_is_nothing_known():
    online = OnlineCosts()
    assert online.costs("w") == WorkerCosts()
    assert online.errors("w").decode is None


def test_formulas_are_found_from_exact_observations():
    assert worst(learned(100)) < 0.01


def test_noise_of_a_tenth_leaves_a_few_percent():
    assert worst(learned(400, lambda rng: rng.uniform(0.9, 1.1))) < 0.06


def test_steps_that_were_interrupted_hardly_count():
    online = learned(400, lambda rng: 20.0 if rng.random() < 0.05 else 1.0)
    assert worst(online) < 0.12


def test_changed_workers_are_measured_again():
    rng, online = random.Random(1), learned(200)
    slower = WorkerCosts(
        prefill=PrefillCost(9e-3, 15e-5, 2e-9), decode=DecodeCost(30e-3, 6e-5, 9e-8), pull=H200.pull
    )
    for _ in range(40):
        online.observe_step("w", prefill_step(rng, slower))
        online.observe_step("w", decode_step(rng, slower))
    assert worst(online, slower) < 0.03


def test_the_error_says_how_far_off_the_last_predictions_were():
    exact = learned(100).errors("w")
    noisy = learned(200, lambda rng: rng.uniform(0.7, 1.3)).errors("w")
    assert exact.prefill < 0.01
    assert exact.decode < 0.01
    assert 0.05 < noisy.decode < 0.3


def test_a_mixed_step_teaches_prefill_when_decoding_is_known():
    rng, online = random.Random(2), OnlineCosts()
    for _ in range(60):
        online.observe_step("w", decode_step(rng))
    for _ in range(60):
        chunk, rows = prefill_step(rng), decode_step(rng)
        seconds = chunk.seconds + rows.seconds - H200.decode.fixed_s
        mixed = StepReport(
            seconds,
            chunk.num_prefill_tokens,
            chunk.prefill_squares,
            rows.num_rows,
            rows.num_context_tokens,
        )
        online.observe_step("w", mixed)
    known = online.costs("w").prefill
    assert known.seconds(8192) == pytest.approx(H200.prefill.seconds(8192), rel=0.02)


def test_classes_of_workers_are_learned_apart():
    online = learned(20)
    assert online.costs("another") == WorkerCosts()


def test_observations_that_cannot_be_are_ignored():
    fit = Fit(2)
    for y in (0.0, -1.0, float("inf"), float("nan")):
        fit.observe((1.0, 2.0), y)
    assert not fit.is_known


@FEW
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 10**6), st.floats(1e-4, 10.0)),
        min_size=1,
        max_size=30,
    )
)
def test_weights_are_finite_and_not_negative_for_any_observations(observed):
    fit = Fit(3)
    for rows, context, seconds in observed:
        fit.observe((1.0, rows, context), seconds)
    assert all(0 <= weight < float("inf") for weight in fit.weights)
    assert any(weight > 0 for weight in fit.weights)
