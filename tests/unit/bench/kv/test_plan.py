import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common.options import PeerProgram
from bench.kv.plan import (
    BLOCK_SIZES,
    KIB,
    MIB,
    HandoffPlan,
    KvCase,
    KvPlan,
    bytes_of,
    cases_of,
    check,
    config_of,
    layout_of,
    limit_of,
    order_of,
    pulls_of,
    quick,
    size_name,
    split_of,
)
from engine.errors import ConfigError
from kvtransfer.records import plan_pieces

FEW = settings(max_examples=20)  # a unit test has 50 ms
PYTHON = Path(sys.executable)
PLAN = KvPlan(
    block_sizes=BLOCK_SIZES,
    backends=("shm", "zmq"),
    num_repeats=7,
    handoff=HandoffPlan("88m", ("zmq", "shm"), num_requests=4, num_repeats=3),
    peers=(PeerProgram("mooncake", PYTHON),),
)


def test_cases_go_up_to_64_mib_and_no_further():
    assert [case.name for case in cases_of(PLAN)] == [
        *("16KiB/latency", "16KiB/16", "16KiB/256", "16KiB"),
        *("64KiB/latency", "64KiB/16", "64KiB/256", "64KiB"),
        *("256KiB/latency", "256KiB/16", "256KiB"),
        *("1MiB/latency", "1MiB/16", "1MiB"),
    ]
    assert all(case.num_bytes == 64 * MIB for case in cases_of(PLAN) if case.is_whole)


def test_single_block_of_the_whole_size_counts_as_bandwidth():
    [case] = cases_of(replace(PLAN, block_sizes=(MIB,), total_bytes=MIB))
    assert (case.name, case.is_latency) == ("1MiB", False)


@FEW
@given(st.sampled_from(cases_of(PLAN)), st.integers(0, 9), st.integers(0, 9))
def test_blocks_are_distinct_in_the_pool_and_the_same_for_every_mover(case, repeat, seed):
    plan = replace(PLAN, seed=seed)
    pool = range(plan.pool_bytes // case.block_bytes)
    pulls = pulls_of(plan, case, repeat)
    for pull in pulls:
        for blocks in (pull.source_blocks, pull.blocks):
            assert len(set(blocks)) == case.num_blocks
            assert set(blocks) <= set(pool)
    assert pulls == pulls_of(plan, case, repeat)
    assert pulls != pulls_of(plan, case, repeat + 1)


def test_blocks_lie_scattered_on_both_sides():
    whole = KvCase(64 * KIB, 1024, is_whole=True)
    [pull] = pulls_of(PLAN, whole, 0)
    for blocks in (pull.source_blocks, pull.blocks):
        neighbours = sum(b == a + 1 for a, b in pairwise(blocks))
        assert neighbours < 16


def test_every_repetition_has_each_way_and_case_once_in_its_own_order():
    ways = [("shm", ""), ("memcpy", "c"), ("memcpy", "ctypes")]
    orders = [order_of(PLAN, ways, repeat) for repeat in (0, 1)]
    expected = Counter((mover, way, case) for mover, way in ways for case in cases_of(PLAN))
    assert [Counter(order) for order in orders] == [expected, expected]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_a_layout_has_blocks_of_the_wanted_size(size):
    assert layout_of(size).block_bytes == size
    assert bytes_of(size_name(size)) == size


def test_a_split_of_the_heads_is_a_mover_of_its_own_beside_its_backend():
    plan = check(replace(PLAN, block_sizes=(64 * KIB,), piece_sizes=(4 * KIB, 16 * KIB)))
    assert plan.ours[:2] == plan.backends
    assert plan.ours[2:6] == (
        *("shm-1to2-4KiB", "shm-1to2-16KiB"),
        *("shm-2to1-4KiB", "shm-2to1-16KiB"),
    )
    assert [limit_of(mover) for mover in ("shm-2to1-4KiB", "shm", "memcpy")] == [
        *("shm", "memcpy"),
        None,
    ]
    assert check(PLAN).ours == PLAN.backends


@pytest.mark.parametrize(("name", "num_pieces"), [("1to2", 16), ("2to1", 8)])
def test_a_rank_of_a_sink_has_blocks_of_the_wanted_size_in_pieces(name, num_pieces):
    backend, split = split_of(f"zmq-{name}-4KiB")
    layout = split.layout(64 * KIB)
    assert backend == "zmq"
    assert layout.of_rank(split.sink).block_bytes == 64 * KIB
    for source in split.sources:
        pieces = plan_pieces(layout, source, split.sink)
        assert len(pieces) == num_pieces
        assert all(piece.num_bytes == 4 * KIB for piece in pieces)


def test_quick_plan_is_smaller_with_the_same_result_names():
    plan = quick(PLAN)
    assert check(plan).num_repeats == 3
    assert plan.handoff.transports == ("zmq",)
    assert {"64KiB", "1MiB"} < {case.name for case in cases_of(plan)}
    assert quick(replace(PLAN, handoff=None)).handoff is None


def test_config_holds_the_plan():
    config = config_of(PLAN)
    assert config["block_sizes"] == "16KiB,64KiB,256KiB,1MiB"
    assert config["handoff_prompt_len"] == 2048
    assert "handoff_shape" not in config_of(replace(PLAN, handoff=None))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_sizes": (12 * KIB,)}, "12 KiB"),
        ({"block_sizes": (24 * KIB,)}, "24 KiB"),
        ({"block_sizes": (0,)}, "0 KiB"),
        ({"block_sizes": ()}, "none given"),
        ({"piece_sizes": (8 * KIB,)}, "--shards.*8 KiB"),
        ({"piece_sizes": (3 * KIB,)}, "--shards.*3 KiB"),
        ({"piece_sizes": (0,)}, "--shards.*0 KiB"),
        ({"handoff": replace(PLAN.handoff, shape="9b")}, "9b"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(PLAN, **change))
