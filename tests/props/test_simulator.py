"""For every trace and cluster, leaping equals stepping, and no request is lost.

The router is given the costs. When it learns them, it sees a stretch of steps as one sample.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.cluster import SimulatedPools, SimulationSetup, simulate
from bench.simulator.hardware import HardwareProfile
from bench.simulator.traces import Trace, TraceRequest
from engine.config import RouterConfig, RouterPolicy
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from router.cluster.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.requests import Finished
from router.native.machine import native_machine

BLOCK_SIZE = 4


@st.composite
def traces(draw):
    requests, at_s = [], 0.0
    for index in range(draw(st.integers(1, 12))):
        at_s += draw(st.sampled_from((0.0, 0.004, 0.05, 1.3)))
        length = draw(st.integers(1, 40))
        shared = draw(st.integers(0, -(-length // BLOCK_SIZE)))
        ids = [i if i < shared else 1000 * (index + 1) + i for i in range(-(-length // BLOCK_SIZE))]
        requests.append(TraceRequest(at_s, length, draw(st.integers(1, 30)), tuple(ids)))
    return Trace("t", BLOCK_SIZE, tuple(requests))


@st.composite
def setups(draw):
    batch = draw(st.sampled_from((8, 16, 64)))
    hardware = HardwareProfile(
        name="any",
        source="made up",
        layout=KVLayout(BLOCK_SIZE, KVFormat.BF16, (KVSection(1, 1, 32),)),
        num_blocks=draw(st.sampled_from((20, 24, 100))),
        prefill=PrefillCost(1e-3, 1e-4, 1e-6),
        decode=DecodeCost(draw(st.sampled_from((5e-3, 0.3))), 1e-4, 1e-6),
        pull=PullCost(1e-3, 1e-4, draw(st.sampled_from((1e4, 1e9)))),
        max_batch_tokens=batch,
        chunk_tokens=draw(st.sampled_from((4, 7, batch))),
        max_running=draw(st.sampled_from((1, 3, 8))),
    )
    pools = draw(
        st.sampled_from(
            (
                SimulatedPools(1, 1),
                SimulatedPools(2, 2),
                SimulatedPools(1, 1, 1),
                SimulatedPools(0, 0, 2),
            )
        )
    )
    return hardware, pools, draw(st.sampled_from((0.0, 2e-4, 0.02)))


@settings(max_examples=40, deadline=None)
@given(traces(), setups(), st.sampled_from(RouterPolicy), st.integers(0, 3))
def test_leaping_equals_stepping_and_every_answer_is_complete(trace, setup, policy, seed):
    hardware, pools, latency_s = setup
    leaping, stepping = (
        simulate(
            trace,
            SimulationSetup(hardware, pools, latency_s, leaps=leaps),
            native_machine(
                RouterConfig(policy=policy, seed=seed, queue_timeout_s=1e4),
                estimates=Estimates(WorkerCosts(hardware.prefill, hardware.decode, hardware.pull)),
            ),
        )
        for leaps in (True, False)
    )
    assert [r.times_s for r in leaping.records] == [r.times_s for r in stepping.records]
    for record in leaping.records:
        assert isinstance(record.outcome, Finished)
        assert len(record.times_s) == record.asked.output_len
        assert list(record.times_s) == sorted(record.times_s)
