"""`bench fluid` with real deployments of a tiny model, once."""

import pytest

from bench.fluid.plan import COMPARED, BoundSetting, FluidPlan, mixes_of
from bench.fluid.results import MixRun, StreamsRun, results, warnings
from bench.fluid.run import measure
from bench.lab.streams import StreamAsk

pytestmark = [pytest.mark.torch, pytest.mark.long]

PLAN = FluidPlan(
    "tiny",
    mixes_of("256/8"),
    streams=StreamAsk(2, 8, 512),
    prompts=StreamAsk(1, 256, 1),
    num_clients=2,
    ramp_s=0.2,
    window_s=1.0,
    num_repeats=1,
)


def test_both_parts_are_measured_on_real_deployments():
    measured = measure(PLAN)
    mixes = [run for run in measured.runs if isinstance(run, MixRun)]
    streams = [run for run in measured.runs if isinstance(run, StreamsRun)]
    assert {run.deployment for run in mixes} == set(COMPARED)
    assert {run.setting for run in streams} == set(BoundSetting)
    assert all(run.requests_per_s > 0 and len(run.busy) == 2 for run in mixes)
    for run in streams:
        assert [stream.num_output_tokens for stream in run.streams] == [512, 512]
    assert measured.pace["tpot_bound_s"] == pytest.approx(1.25 * measured.pace["pace_tpot_s"])
    found = {result.name: result.value for result in results(measured.runs)}
    assert found["fluid/256+8"] > 0
    assert "itl_ratio/bound" in found
    assert not [line for line in warnings(measured.runs) if "cached" in line]
