"""Goodput as DistServe defines it, and summaries of token gaps."""

from array import array
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.load import SloBounds
from bench.common.stats import summarize
from bench.simulator.cluster import SimulatedPools, SimulatedRequest, SimulationSetup, simulate
from bench.simulator.goodput import distserve_goodput, greatest_speed
from bench.simulator.hardware import hardware_named
from bench.simulator.results import summary_of_gaps
from bench.simulator.traces import Trace, TraceRequest
from engine.config import RouterConfig
from router.machine.machine import RouterMachine

HARDWARE = hardware_named("h200-qwen3-8b")
# Two answers of one second each; only one of them runs at a time.
PROMPT_LEN, ANSWER_LEN = 700, 200


def play(trace):
    machine = RouterMachine(RouterConfig(queue_timeout_s=1e6))
    return simulate(trace, SimulationSetup(HARDWARE, SimulatedPools(1, 1)), machine)


@pytest.mark.parametrize(
    ("limit", "found"), [(0.01, 0.0), (0.3, 0.3), (1.0, 1.0), (3.0, 3.0), (99.0, 16.0)]
)
def test_greatest_speed_is_found_within_5_percent(limit, found):
    speed = greatest_speed(lambda speed: speed <= limit, least=1 / 16, most=16.0)
    assert speed == pytest.approx(found, rel=0.05)
    assert speed <= limit


def test_distserve_goodput_is_the_highest_rate_with_90_percent_attainment():
    alone_s = HARDWARE.prefill.seconds(PROMPT_LEN)
    requests = [TraceRequest(i / 10, PROMPT_LEN, 2) for i in range(40)]
    trace = Trace("t", 512, tuple(requests))
    # A request that arrives during another prompt is late, so prompts must not overlap.
    slo = SloBounds(ttft_s=alone_s + 2e-3)
    figure = distserve_goodput(trace, play, slo, gpus=2)["goodput/distserve"]
    assert figure.unit == "1/s/GPU"
    assert figure.value == pytest.approx(40 / 3.9 / 2 * (0.1 / alone_s), rel=0.15)


def test_no_distserve_goodput_without_bounds_or_rate():
    trace = Trace("t", 512, (TraceRequest(0.0, 10, 2),))
    assert distserve_goodput(trace, play, SloBounds(ttft_s=1.0), gpus=1) == {}
    assert distserve_goodput(trace, play, SloBounds(), gpus=1) == {}


def record_of(gaps_s):
    """Returns the record of a request with these gaps between its tokens."""
    times_s = array("d", accumulate(gaps_s, initial=1.0))
    return SimulatedRequest(TraceRequest(0.0, 1, len(times_s)), times_s=times_s)


GAPS_S = st.lists(st.one_of(st.sampled_from((0.01, 0.0125)), st.floats(0, 1)), max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(GAPS_S, max_size=20).filter(any))
def test_gap_summary_equals_that_of_one_list(gaps_s):
    records = [record_of(each) for each in gaps_s]
    gaps = np.concatenate([np.diff(r.times_s) for r in records]).tolist()
    found = summary_of_gaps(records)
    expected = summarize(gaps)
    assert (found.p50, found.p90, found.p99) == (expected.p50, expected.p90, expected.p99)
    assert found.mean == pytest.approx(expected.mean, rel=1e-12)
