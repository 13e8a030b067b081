"""Simulations that keep no request records have the same results as simulations that do."""

from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.client.load import SloBounds
from bench.common.stats import summarize
from bench.simulator.cli import PlayedLoad
from bench.simulator.cluster import SimulatedPools, SimulationSetup, simulate
from bench.simulator.goodput import WIDTH, GapSketch, InfiniteCache
from bench.simulator.hardware import hardware_named
from bench.simulator.results import figures_of, streamed_figures
from bench.simulator.traces import (
    MOONCAKE_BLOCK_TOKENS,
    Chat,
    Trace,
    TraceRequest,
    conversations,
    synthetic,
)
from deploy.commands.main import app
from engine.config import RouterConfig
from router.machine.machine import RouterMachine

SLO = SloBounds(0.5, 0.01)
CHAT = Chat(rate_per_s=8.0, families=3, output_tokens=32)


def test_a_stream_has_the_figures_of_a_trace():
    setup = SimulationSetup(hardware_named("h200-qwen3-8b"), SimulatedPools(2, 2))
    config = RouterConfig(seed=0)
    run = simulate(synthetic(CHAT, 60, Random(4)), setup, RouterMachine(config))
    kept = figures_of(run, SLO, usd_per_gpu_hour=4.0)
    streamed = streamed_figures(
        Trace("synthetic", MOONCAKE_BLOCK_TOKENS, ()),
        islice(conversations(CHAT, Random(4)), 60),
        setup,
        RouterMachine(config),
        SLO,
        usd_per_gpu_hour=4.0,
    )
    gaps = {name for name in kept if name.startswith("itl/")}
    assert gaps
    assert streamed.keys() == kept.keys()
    for name, figure in kept.items():
        if name in gaps:
            assert streamed[name].value == pytest.approx(figure.value, rel=WIDTH)
        else:
            assert streamed[name] == figure


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=300))
def test_a_sketch_is_wrong_by_less_than_a_bin(gaps_s):
    sketch = GapSketch()
    for start in range(0, len(gaps_s), 7):
        sketch.add(np.array(gaps_s[start : start + 7]))
    told, exact = sketch.summary(), summarize(gaps_s)
    assert told is not None
    assert exact is not None
    assert told.mean == pytest.approx(exact.mean)
    ordered = sorted(gaps_s)
    for q, value in ((50, told.p50), (90, told.p90), (99, told.p99)):
        lower = ordered[(len(ordered) - 1) * q // 100]
        assert value == pytest.approx(lower, rel=WIDTH)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2**20), min_size=1, max_size=5), st.integers(1, 4)),
        max_size=30,
    )
)
def test_the_cache_holds_what_a_set_would_hold(prompts):
    cache, held = InfiniteCache(4), set()
    num_hit = num_tokens = 0
    for ids, num_last in prompts:
        length = 4 * (len(ids) - 1) + num_last
        usable = (length - 1) // 4
        leading = next((n for n in range(usable) if ids[n] not in held), usable)
        num_hit, num_tokens = num_hit + 4 * leading, num_tokens + length
        held.update(ids[: length // 4])
        cache.see(TraceRequest(0.0, length, 1, tuple(ids)))
    assert cache.hits == (num_hit / num_tokens if num_tokens else 0.0)


def test_only_a_synthetic_trace_streams(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}')
    result = CliRunner().invoke(app, ["simulate", "--stream", "--trace", str(trace)])
    assert result.exit_code != 0
    assert "--stream is for a synthetic trace" in result.output


def test_long_synthetic_traces_stream_unless_an_option_needs_their_requests():
    long = PlayedLoad("synthetic", requests=1_000_000, goodput_requests=0)
    assert long.streams(uses_requests=False)
    assert not long.streams(uses_requests=True)
    assert not replace(long, goodput_requests=1).streams(uses_requests=False)
    assert not replace(long, requests=1000).streams(uses_requests=False)
    assert not replace(long, requests=None).streams(uses_requests=False)
    assert not replace(long, trace="trace.jsonl").streams(uses_requests=False)
