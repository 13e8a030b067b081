"""Runs `bench fluid` once, with real deployments of a tiny model."""

import pytest

from bench.common.command import say_nothing
from bench.lab.fluid.figures import COMPARED, STREAM_ARMS, results, warnings
from bench.lab.fluid.study import FluidStudy

pytestmark = [pytest.mark.torch, pytest.mark.long]

STUDY = FluidStudy(
    shape="tiny",
    mixes="256/8",
    streams=2,
    stream_output=512,
    prompt_input=256,
    clients=2,
    window_s=1.0,
    repeat=1,
)


def test_both_parts_are_measured_on_real_deployments():
    measured = STUDY.run(say_nothing)
    assert {run.deployment for run in measured.mixes} == set(COMPARED)
    assert {run.arm for run in measured.streams} == set(STREAM_ARMS)
    assert all(run.requests_per_s > 0 and len(run.busy) == 2 for run in measured.mixes)
    for run in measured.streams:
        assert [stream.num_output_tokens for stream in run.streams] == [512, 512]
    assert measured.pace["tpot_bound_s"] == pytest.approx(1.25 * measured.pace["pace_tpot_s"])
    found = {result.name: result.value for result in results(measured)}
    assert found["fluid/256+8"] > 0
    assert "itl_ratio/bound" in found
    assert not [line for line in warnings(measured) if "cached" in line]
