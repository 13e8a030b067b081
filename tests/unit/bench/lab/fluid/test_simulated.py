"""`bench fluid --simulated`: its settings, its ratios, and its command."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.client.load import SloBounds
from bench.common.report import from_json
from bench.lab.fluid.figures import mixes_of
from bench.lab.fluid.simulated import (
    GOALS,
    Loops,
    SimulatedFluidPlan,
    best_of,
    play,
    ratios,
    requests_per_s,
    setup_of,
    splits_of_all,
)
from bench.simulator.cluster import SimulatedPools
from bench.simulator.hardware import hardware_named
from bench.simulator.traces import Trace, TraceRequest

TRACE = Trace("t", 512, tuple(TraceRequest(0.2 * i, 2000, 20) for i in range(20)))
PLAN = SimulatedFluidPlan(
    hardware_named("h200-qwen3-8b"),
    {"t": TRACE},
    SimulatedPools(2, 1),
    splits=splits_of_all(SimulatedPools(2, 1)),
    chunks=(256, 2048),
    slo=SloBounds(1.0, 0.025),
)


def test_fluid_is_held_against_the_best_of_each_kind():
    goodput = {"fluid_2+1": 6.0, "split_1+2": 4.0, "split_2+1": 5.0, "mixed_3_chunk_256": 8.0}
    found = ratios(goodput)
    assert best_of(goodput, "split") == "split_2+1"
    assert found["goodput_fluid/best_split"].value == pytest.approx(1.2)
    assert found["goodput_fluid/colocated"].value == pytest.approx(0.75)
    assert GOALS.bound("goodput_fluid/best_split/t") == 1.1
    assert GOALS.bound("goodput/fluid_2+1/t") is None


@pytest.mark.parametrize("use", [*PLAN.settings()], ids=lambda use: use.name)
def test_every_setting_answers_the_whole_load(use):
    run = play(PLAN, use, TRACE)
    assert all(len(record.times_s) == 20 for record in run.records)


def test_command_writes_its_figures(tmp_path):
    path = tmp_path / "fluid_simulated.json"
    options = ["--hardware", "h200-qwen3-0.6b", "--prefill", "1", "--decode", "1"]
    options += ["--mixes", "64/256", "--window-s", "1"]
    options += ["--trace", "synthetic", "--requests", "8", "--quick", "--json", str(path)]
    result = CliRunner().invoke(app, ["fluid", "--simulated", *options])
    assert result.exit_code == 0, result.output
    report = from_json(path.read_bytes())
    assert report.bench == "fluid_simulated"
    names = {one.name for one in report.results}
    assert {"goodput_fluid/best_split/synthetic", "goodput/fluid_1+1/synthetic"} <= names
    assert report.value("goodput_fluid/colocated/synthetic") > 0
    assert report.value("loop_fluid/64+256") > 0.5


LOOPS = replace(
    PLAN,
    hardware=hardware_named("thread-88m-int8"),
    fluid=SimulatedPools(1, 1),
    splits=splits_of_all(SimulatedPools(1, 1)),
    chunks=(256,),
    loops=Loops(mixes_of("1024/16,64/256,turning"), 8, window_s=10.0),
    loads={},
)


@pytest.mark.parametrize("mix", LOOPS.loops.mixes, ids=lambda mix: mix.name)
def test_fluid_pools_answer_nearly_as_many_requests_as_the_better_of_walls_and_mixed(mix):
    found = {
        use.name: requests_per_s(LOOPS.loops, mix, setup_of(LOOPS, use), seed=0)
        for use in LOOPS.settings()
    }
    assert list(found) == ["fluid_1+1", "split_1+1", "mixed_2_chunk_256"]
    fluid, *others = found.values()
    assert fluid >= 0.95 * max(others), found


def test_a_closed_loop_keeps_its_clients_busy():
    mix = mixes_of("64/16")[0]
    setup = setup_of(LOOPS, next(LOOPS.settings()))
    one, eight = (
        requests_per_s(Loops((mix,), num_clients, window_s=5.0), mix, setup, seed=0)
        for num_clients in (1, 8)
    )
    assert 1 < eight / one < 8
