"""The figures of `bench fluid`, and prompts that arrive beside streams."""

import asyncio
from itertools import count

import pytest

from bench.client.answers import Failure
from bench.client.load import RequestsFailed
from bench.fluid.plan import BoundSetting, FluidDeployment
from bench.fluid.results import GOALS, MixRun, StreamsRun, results, rivals_of, warnings
from bench.fluid.run import run_beside_arrivals
from engine.clock import MonotonicClock
from tests.kits.answers import answer_at

FLUID, WALLED, MIXED = FluidDeployment.FLUID, FluidDeployment.WALLED, FluidDeployment.MIXED


def mix_run(deployment, per_s, *, repeat=0, mix="64+256", **rest):
    """A window of ten seconds; all chunks of an answer are near each other."""
    every_s = 1 / per_s
    answers = [
        answer_at([i * every_s + j * 1e-3 for j in range(1, 5)], sent_s=i * every_s)
        for i in range(round(10 * per_s))
    ]
    figures = {"busy": (0.2, 0.9), "others_share": 0.01, **rest}
    return MixRun(mix, deployment, repeat, 0.0, 10.0, tuple(answers), **figures)


def streams_run(setting, gap_s, *, repeat=0, prompts=()):
    stream = answer_at([i * gap_s for i in range(101)])
    return StreamsRun(setting, repeat, (stream, stream), prompts, others_share=0.0)


def by_name(runs):
    return {result.name: result for result in results(runs)}


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
    assert found["itl_p99/m/fluid"].value > 3000  # the early one's gap is in the window
    assert found["requests/m/fluid"].value == pytest.approx(0.2)
    assert "busy_least/m/fluid" not in found


def test_busy_shares_are_of_one_core():
    found = by_name([mix_run(WALLED, 2.0)])
    assert found["busy_least/64+256/walled"].value == pytest.approx(20)
    assert found["busy_most/64+256/walled"].value == pytest.approx(90)


def test_gaps_beside_prompts_are_held_against_those_without():
    prompt = answer_at([0.5], sent_s=0.1)
    runs = [
        streams_run(BoundSetting.BOUND_IDLE, 0.010),
        streams_run(BoundSetting.BOUND, 0.012, prompts=(prompt, Failure("http_429", "later"))),
        streams_run(BoundSetting.WALLED_IDLE, 0.010),
        streams_run(BoundSetting.WALLED, 0.011, prompts=(prompt,)),
    ]
    found = by_name(runs)
    assert found["itl_ratio/bound"].value == pytest.approx(1.2)
    assert found["itl_ratio/walled"].value == pytest.approx(1.1)
    assert GOALS.is_met(found["itl_ratio/bound"])
    assert found["prompt_ttft_p50/bound"].value == pytest.approx(400)
    assert found["prompts/bound"].value == pytest.approx(1 / 1.188)
    assert "prompts/bound_idle" not in found
    assert found["failed"].value == 1


def test_goals_are_met_from_their_bounds_on():
    found = by_name([mix_run(FLUID, 9.6), mix_run(WALLED, 10.0), mix_run(MIXED, 1.0)])
    assert GOALS.is_met(found["fluid/64+256"])
    assert GOALS.is_met(found["requests/64+256/fluid"]) is None


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ({"others_share": 0.2}, "other processes used up to 20% of the CPU"),
        ({"results": (answer_at([1.0], num_cached=64),)}, "64 tokens of prompts were cached"),
        ({"results": (answer_at([1.0], num_tokens=2),)}, "2.00 tokens came in a chunk"),
        ({"results": (Failure("http_429", "later"),)}, "failed: 1 http_429 (later)"),
    ],
)
def test_disturbed_measurement_warns(rest, told):
    fields = {"results": (answer_at([1.0]),), **rest}
    [line] = warnings([MixRun("m", FLUID, 0, 0.0, 10.0, **fields)])
    assert line.startswith(told)


def beside(send, arrivals, streams=(b"stream",)):
    prompts = (b"prompt %d" % i for i in count())
    clock = MonotonicClock()
    return asyncio.run(
        run_beside_arrivals(send, streams, prompts, iter(arrivals), now_s=clock.now_s)
    )


def test_prompts_arrive_without_waiting_for_each_other_until_streams_end():
    """The streams end when three prompts are open, none of which is answered before."""
    open_prompts, enough = [], asyncio.Event()

    async def send(body):
        if body == b"stream":
            await enough.wait()
            return answer_at([1, 2, 3])
        open_prompts.append(body)
        if len(open_prompts) == 3:
            enough.set()
        await enough.wait()
        return answer_at([1])

    answers, others = beside(send, [0.0, 0.0, 0.0, 3600.0])
    assert (len(answers), len(others)) == (1, 3)
    assert open_prompts == [b"prompt 0", b"prompt 1", b"prompt 2"]


def test_failed_stream_leaves_no_figures_and_failed_prompt_is_kept():
    async def fails(body):
        return Failure("http_500", body.decode())

    with pytest.raises(RequestsFailed, match="1 of 1 streams failed"):
        beside(fails, [])

    async def send(body):
        return answer_at([1, 2, 3]) if body == b"stream" else Failure("http_429", "later")

    _, others = beside(send, [0.0])
    assert others in ([], [Failure("http_429", "later")])  # the stream may have ended first
