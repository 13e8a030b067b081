"""Figures of many simulations, and of many answers."""

from array import array
from random import Random

import numpy as np
import pytest

from bench.client.load import SloBounds
from bench.common.stats import summarize
from bench.simulator.cluster import SimulatedPools, SimulatedRequest, SimulationSetup, simulate
from bench.simulator.goodput import distserve_goodput, greatest_speed
from bench.simulator.hardware import hardware_named
from bench.simulator.results import summary_of_gaps
from bench.simulator.traces import Trace, TraceRequest
from engine.config import RouterConfig
from router.native.machine import native_machine

HARDWARE = hardware_named("h200-qwen3-8b")
# Two answers of one second each, at most one of them at a time.
PROMPT_LEN, ANSWER_LEN = 700, 200


def play(trace):
    machine = native_machine(RouterConfig(queue_timeout_s=1e6))
    return simulate(trace, SimulationSetup(HARDWARE, SimulatedPools(1, 1)), machine)


@pytest.mark.parametrize(
    ("limit", "found"), [(0.01, 0.0), (0.3, 0.3), (1.0, 1.0), (3.0, 3.0), (99.0, 16.0)]
)
def test_the_greatest_speed_is_found_within_a_twentieth(limit, found):
    speed = greatest_speed(lambda speed: speed <= limit, least=1 / 16, most=16.0)
    assert speed == pytest.approx(found, rel=0.05)
    assert speed <= limit


def test_where_the_trace_s_own_pace_is_the_least_no_slower_one_is_tried():
    tried = []
    assert greatest_speed(lambda s: bool(tried.append(s)), least=1.0, most=16.0) == 0.0
    assert tried == [1.0]


def test_distserve_s_goodput_is_the_rate_up_to_which_nine_of_ten_keep_their_bounds():
    alone_s = HARDWARE.prefill.seconds(PROMPT_LEN)
    requests = [TraceRequest(i / 10, PROMPT_LEN, 2) for i in range(40)]
    trace = Trace("t", 512, tuple(requests))
    # Whoever comes while another prompt is computed is late, so prompts must not overlap.
    slo = SloBounds(ttft_s=alone_s + 2e-3)
    figure = distserve_goodput(trace, play, slo, gpus=2)["goodput/distserve"]
    assert figure.unit == "1/s/GPU"
    assert figure.value == pytest.approx(40 / 3.9 / 2 * (0.1 / alone_s), rel=0.15)


def test_there_is_no_goodput_of_what_is_not_bounded_or_has_no_rate():
    trace = Trace("t", 512, (TraceRequest(0.0, 10, 2),))
    assert distserve_goodput(trace, play, SloBounds(ttft_s=1.0), gpus=1) == {}
    assert distserve_goodput(trace, play, SloBounds(), gpus=1) == {}


def records_of(lengths, rng):
    records = []
    for length in lengths:
        times_s = array("d", [1.0])
        for _ in range(length - 1):
            times_s.append(times_s[-1] + rng.choice((0.01, 0.0125, rng.expovariate(50.0))))
        records.append(SimulatedRequest(TraceRequest(0.0, 1, length), times_s=times_s))
    return records


@pytest.mark.parametrize("lengths", [(2,), (3, 1, 2), (50,) * 30, (1, 400, 2, 300)])
@pytest.mark.parametrize("num_bins", [1, 7, 1000])
def test_gaps_are_summarised_as_if_they_were_in_one_list(lengths, num_bins):
    records = records_of(lengths, Random(len(lengths)))
    gaps = np.concatenate([np.diff(r.times_s) for r in records]).tolist()
    found = summary_of_gaps(records, num_bins=num_bins, num_together=3)
    expected = summarize(gaps)
    assert (found.p50, found.p90, found.p99) == (expected.p50, expected.p90, expected.p99)
    assert found.mean == pytest.approx(expected.mean, rel=1e-12)


def test_where_no_answer_has_two_tokens_there_are_no_gaps():
    assert summary_of_gaps(records_of((1, 1), Random(0))) is None
