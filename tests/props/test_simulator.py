"""For every trace and cluster, leaping over steps gives the results of single steps.

No request is lost, in clusters with stores too. The router is given the costs. If it learned the
costs, it would see a leap over several steps as one sample.
"""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.cluster import SimulatedPools, SimulationSetup, simulate
from bench.simulator.hardware import HardwareProfile
from bench.simulator.tiers import SimulatedStores, TierPrice
from bench.simulator.traces import Trace, TraceRequest
from engine.config import RouterConfig, RouterPolicy, StoreEviction, StoreWrites
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.machine import RouterMachine
from router.machine.requests import Finished

BLOCK_SIZE = 4
PULLING = (RouterPolicy.SLO, RouterPolicy.LEAST_LOADED)


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


@settings(max_examples=settings().max_examples // 4)
@given(traces(), setups(), st.sampled_from(RouterPolicy), st.integers(0, 3))
def test_leaping_equals_stepping_and_every_answer_is_complete(trace, setup, policy, seed):
    hardware, pools, latency_s = setup
    leaping, stepping = (
        simulate(
            trace,
            SimulationSetup(hardware, pools, latency_s, leaps=leaps),
            RouterMachine(
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


@st.composite
def returning(draw):
    """Returns prompts of a few families, which return after small workers evicted their blocks."""
    requests, at_s = [], 0.0
    for family in draw(st.lists(st.integers(0, 3), min_size=8, max_size=20)):
        at_s += draw(st.sampled_from((0.05, 1.0, 8.0)))
        length = draw(st.integers(17, 40))
        ids = tuple(100 * family + i for i in range(-(-length // BLOCK_SIZE)))
        requests.append(TraceRequest(at_s, length, draw(st.integers(1, 30)), ids))
    return Trace("t", BLOCK_SIZE, tuple(requests))


@st.composite
def stores(draw):
    """Returns stores so small that tiers overflow, and prompts need blocks that are being moved."""
    rate = draw(st.sampled_from((1e4, 1e6)))  # bytes per second; a block has 512 bytes
    price = TierPrice(rate, rate / 2, draw(st.sampled_from((0.0, 0.01, 5.5))), 2)
    lower = draw(
        st.sampled_from(({"disk_blocks": 60}, {"object_blocks": 60}, {"disk_blocks": 3}, {}))
    )
    return SimulatedStores(
        draw(st.sampled_from((10, 14, 80))),
        **lower,
        disk=price,
        objects=price,
        node_workers=draw(st.integers(1, 4)),
        eviction=draw(st.sampled_from(StoreEviction)),
        writes=draw(st.sampled_from(StoreWrites)),
        copies=draw(st.integers(1, 3)),
        take_bytes_per_s=draw(st.sampled_from((1e4, 1e9))),
    )


@settings(max_examples=settings().max_examples // 4)
@given(returning(), setups(), stores(), st.sampled_from(PULLING), st.integers(0, 3))
def test_every_answer_is_complete_and_nothing_is_held_with_any_stores(
    trace, setup, some, policy, seed
):
    """`simulate` validates every worker and every store after the run."""
    hardware, pools, latency_s = setup
    dear = PrefillCost(1e-3, 0.3)  # with these costs a pull pays, even from a slow disk
    hardware = msgspec.structs.replace(hardware, prefill=dear, num_blocks=20)
    costs = WorkerCosts(hardware.prefill, hardware.decode, hardware.pull)
    first, second = (
        simulate(
            trace,
            SimulationSetup(hardware, pools, latency_s, stores=some),
            RouterMachine(
                RouterConfig(policy=policy, seed=seed, queue_timeout_s=1e4),
                estimates=Estimates(costs),
            ),
        )
        for _ in range(2)
    )
    assert [r.times_s for r in first.records] == [r.times_s for r in second.records]
    assert first.stores == second.stores
    assert len(first.stores) == -(-pools.total // some.node_workers)
    for record in first.records:
        assert isinstance(record.outcome, Finished)
        assert len(record.times_s) == record.asked.output_len
        assert list(record.times_s) == sorted(record.times_s)
    for store in first.stores:
        assert store.num_held["host"] <= some.memory_blocks
