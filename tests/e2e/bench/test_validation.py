"""The real deployments with which simulator results are compared."""

from itertools import count
from random import Random

import pytest

from bench.lab.validation.live import deployment, play
from bench.lab.validation.study import STRETCH, ValidationLoad, made, worker_settings
from bench.simulator.cluster import SimulatedPools
from deploy.base.defaults import BUNDLED_MODEL
from engine.config import RouterConfig
from engine.messages import Role

NUM_REQUESTS = 6


@pytest.mark.torch
def test_a_deployment_of_fluid_workers_answers_a_trace_and_is_recorded(tmp_path):
    load = ValidationLoad(20.0, NUM_REQUESTS, input_tokens=64, output_tokens=8)
    trace = made(load, Random(0), count())
    with deployment(SimulatedPools(1, 1), worker_settings(), BUNDLED_MODEL) as live:
        told = play(live, trace, RouterConfig(seed=0), tmp_path)
    assert [len(asked.times_s) for asked in told.asked.values()] == [
        asked.output_len for asked in trace.requests
    ]
    assert {info.role for info in told.workers.values()} == {Role.PREFILL, Role.DECODE}
    assert {info.stretch for info in told.workers.values()} == {STRETCH}
    assert told.gateway_cpu_s > 0
