"""The results of `bench fluid`, computed from made-up runs."""

import pytest

from bench.client.answers import Failure
from bench.lab.fluid.figures import (
    FLUID,
    GOALS,
    MIXED,
    STREAM_ARMS,
    WALLED,
    FluidMeasured,
    MixRun,
    results,
    rivals_of,
)
from bench.lab.streams import BesideRun
from tests.kits.answers import answer_at


def mix_run(deployment, per_s, *, repeat=0, mix="64+256", **rest):
    """Returns a run with a window of ten seconds. All chunks of an answer are close together."""
    every_s = 1 / per_s
    answers = [
        answer_at([i * every_s + j * 1e-3 for j in range(1, 5)], sent_s=i * every_s)
        for i in range(round(10 * per_s))
    ]
    figures = {"busy": (0.2, 0.9), "others_share": 0.01, **rest}
    return MixRun(mix, deployment, repeat, 0.0, 10.0, tuple(answers), **figures)


def streams_run(arm, gap_s, *, repeat=0, prompts=()):
    stream = answer_at([i * gap_s for i in range(101)])
    return BesideRun(arm, (stream, stream), prompts, others_share=0.0, repeat=repeat)


def by_name(mixes=(), streams=()):
    measured = FluidMeasured([*mixes], [*streams])
    return {result.name: result for result in results(measured)}


def test_fluid_is_held_against_the_better_one_of_the_others():
    rates = {FLUID: (4.0, 5.0, 6.0), WALLED: (2.0, 2.0, 2.0), MIXED: (4.0, 4.0, 5.0)}
    runs = [
        mix_run(deployment, per_s, repeat=repeat)
        for deployment, found in rates.items()
        for repeat, per_s in enumerate(found)
    ]
    assert rivals_of(runs) == {"64+256": MIXED}
    found = by_name(runs)
    assert found["fluid/64+256"].runs == pytest.approx((1.0, 1.25, 1.2))
    assert found["requests/64+256/walled"].value == pytest.approx(2.0)


def test_latencies_are_those_of_requests_sent_in_the_window():
    early = answer_at([5.0, 9.0], sent_s=-1.0)
    run = MixRun("m", FLUID, 0, 0.0, 10.0, (early, answer_at([1.5, 1.6, 1.8], sent_s=1.0)))
    found = by_name([run])
    assert found["ttft_p50/m/fluid"].value == pytest.approx(500)
    assert found["tpot_p50/m/fluid"].value == pytest.approx(150)
    assert found["itl_p99/m/fluid"].value > 3000  # the gap of the early answer is inside the window
    assert found["requests/m/fluid"].value == pytest.approx(0.2)
    assert "busy_least/m/fluid" not in found


def test_gaps_beside_prompts_are_held_against_those_without():
    prompt = answer_at([0.5], sent_s=0.1)
    runs = [
        streams_run("bound_idle", 0.010),
        streams_run("bound", 0.012, prompts=(prompt, Failure("http_429", "later"))),
        streams_run("walled_idle", 0.010),
        streams_run("walled", 0.011, prompts=(prompt,)),
    ]
    assert [run.arm for run in runs] == [*STREAM_ARMS]
    found = by_name(streams=runs)
    assert found["itl_ratio/bound"].value == pytest.approx(1.2)
    assert found["itl_ratio/walled"].value == pytest.approx(1.1)
    assert GOALS.is_met(found["itl_ratio/bound"])
    assert found["prompt_ttft_p50/bound"].value == pytest.approx(400)
    assert found["prompts/bound"].value == pytest.approx(1 / 1.188)
    assert "prompts/bound_idle" not in found
    assert found["failed"].value == 1
