"""The cases, pulls and options of `bench kv`."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lab.kv.cases import KIB, MIB, limit_of, split_of
from bench.lab.kv.study import KvStudy
from engine.errors import ConfigError
from kvtransfer.records import plan_pieces

FEW = settings(max_examples=20)  # a unit test may take 50 ms
STUDY = KvStudy(backends="shm,zmq")
PULLS = STUDY.pulls


def test_cases_go_up_to_64_mib_and_no_further():
    assert [case.name for case in PULLS.cases] == [
        *("16KiB/latency", "16KiB/16", "16KiB/256", "16KiB"),
        *("64KiB/latency", "64KiB/16", "64KiB/256", "64KiB"),
        *("256KiB/latency", "256KiB/16", "256KiB"),
        *("1MiB/latency", "1MiB/16", "1MiB"),
    ]
    assert all(case.num_bytes == 64 * MIB for case in PULLS.cases if case.is_whole)


@FEW
@given(st.sampled_from(PULLS.cases), st.integers(0, 9), st.integers(0, 9))
def test_blocks_are_distinct_in_the_pool_and_the_same_for_every_mover(case, repeat, seed):
    plan = replace(PULLS, seed=seed)
    pool = range(plan.pool_bytes // case.block_bytes)
    pulls = plan.of(case, repeat)
    for pull in pulls:
        for blocks in (pull.source_blocks, pull.blocks):
            assert len(set(blocks)) == case.num_blocks
            assert set(blocks) <= set(pool)
    assert pulls == plan.of(case, repeat)
    assert pulls != plan.of(case, repeat + 1)


def test_a_split_of_the_heads_is_a_mover_of_its_own_beside_its_backend():
    study = replace(STUDY, block_sizes="64", shards="4,16")
    assert study.ours[:2] == study.chosen
    assert study.ours[2:6] == (
        *("shm-1to2-4KiB", "shm-1to2-16KiB"),
        *("shm-2to1-4KiB", "shm-2to1-16KiB"),
    )
    assert [limit_of(mover) for mover in ("shm-2to1-4KiB", "shm", "memcpy")] == [
        *("shm", "memcpy"),
        None,
    ]
    assert STUDY.movers == ("shm", "zmq", "memcpy", "tcp")


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_sizes": "12"}, "12 KiB"),
        ({"block_sizes": "24"}, "24 KiB"),
        ({"block_sizes": "0"}, "0 KiB"),
        ({"block_sizes": ""}, "none given"),
        ({"shards": "8"}, "--shards.*8 KiB"),
        ({"shards": "3"}, "--shards.*3 KiB"),
        ({"shards": "0"}, "--shards.*0 KiB"),
        ({"shape": "9b"}, "9b"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(STUDY, **change)
