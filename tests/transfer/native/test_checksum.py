"""Checksums computed while frames are filled and emptied equal xxhash's, and the copies are
right.
"""

import threading
from itertools import accumulate, pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import KVFormat, KVLayout, KVSection
from kvtransfer.messages import Identity
from kvtransfer.native import copying
from kvtransfer.native.copying import copy_records, gather_records, scatter_records
from kvtransfer.packing import pack, unpack
from kvtransfer.records import RecordPiece
from kvtransfer.wire import agree
from tests.kits.records import random_records, whole
from tests.kits.seeds import seeds

SHORTEST_LONG = 241  # bytes; for shorter input XXH3 is another algorithm


def xxh3(frame):
    return xxhash.xxh3_64_intdigest(frame.tobytes())


def check_gather(source, ids, pieces, record_bytes):
    """Compares bytes and checksum of a gather with copying and hashing in two passes."""
    frame, expected = (random_records(len(ids), record_bytes, seed=9) for _ in range(2))
    copy_records(expected, None, source, ids, pieces)
    assert gather_records(frame, source, ids, pieces) == xxh3(expected)
    assert np.array_equal(frame, expected)


def check_scatter(frame, rows, pieces, sink_shape, sink_ids):
    sink, expected = (random_records(*sink_shape, seed=9) for _ in range(2))
    copy_records(expected, sink_ids, frame, rows, pieces)
    assert scatter_records(sink, sink_ids, frame, rows, pieces) == xxh3(frame)
    assert np.array_equal(sink, expected)


@pytest.fixture
def _only_native(monkeypatch):
    """Fails the test unless C++ computes the checksums."""

    def refuse(frame):
        raise AssertionError(f"{len(frame)} records are hashed by xxhash")

    monkeypatch.setattr(copying, "checksum", refuse)


@pytest.mark.usefixtures("_only_native")
@pytest.mark.parametrize("sizes", [range(SHORTEST_LONG, 3400), range(256, 8193, 64)], ids=str)
def test_frames_of_every_size_have_the_checksum_of_xxhash(sizes):
    source = random_records(1, max(sizes))
    for num_bytes in sizes:
        record = np.ascontiguousarray(source[:, :num_bytes])
        frame, sink = np.zeros_like(record), np.zeros_like(record)
        expected = xxh3(record)
        assert gather_records(frame, record, [0], whole(num_bytes)) == expected, num_bytes
        assert scatter_records(sink, [0], frame, [0], whole(num_bytes)) == expected, num_bytes
        assert np.array_equal(sink, record)


def test_frames_too_short_for_that_have_the_checksum_of_xxhash():
    source = random_records(1, SHORTEST_LONG)
    for num_bytes in range(1, SHORTEST_LONG + 1):
        record = np.ascontiguousarray(source[:, :num_bytes])
        frame, sink = np.zeros_like(record), np.zeros_like(record)
        assert gather_records(frame, record, [0], whole(num_bytes)) == xxh3(record)
        assert scatter_records(sink, [0], frame, [0], whole(num_bytes)) == xxh3(record)
        assert np.array_equal(sink, record)
    empty = np.zeros((0, 64), np.uint8)
    assert gather_records(empty, source, [], whole(64)) == xxh3(empty)
    assert scatter_records(sink, [], empty, [], whole(64)) == xxh3(empty)


@pytest.mark.usefixtures("_only_native")
@pytest.mark.parametrize("seed", seeds(6))
def test_frames_of_up_to_4_mib_have_the_checksum_of_xxhash(seed):
    rng = np.random.default_rng(seed)
    record_bytes = 64 * int(rng.integers(4, 2048))
    count = int(rng.integers(1, 2**22 // record_bytes + 1))
    pool = random_records(2 * count, record_bytes, seed=seed)
    ids = [int(i) for i in rng.permutation(2 * count)[:count]]
    check_gather(pool, ids, whole(record_bytes), record_bytes)
    check_scatter(pool[:count], range(count), whole(record_bytes), pool.shape, ids)


@st.composite
def frames(draw):
    """Draws (number of records, frame's record bytes, pool's record bytes, pieces of a record).

    Pieces are (offset in the pool's record, offset in the frame's record, bytes). They do not
    overlap in the frame, may leave gaps, and are in any order.
    """
    frame_bytes, pool_bytes = draw(st.integers(1, 3000)), draw(st.integers(1, 3000))
    cuts = draw(st.lists(st.integers(0, min(frame_bytes, pool_bytes)), max_size=6))
    pieces = []
    for start, end in list(pairwise(sorted(cuts)))[:: draw(st.integers(1, 2))]:
        shift = draw(st.integers(0, pool_bytes - end))
        pieces.append((start + shift, start, end - start))
    if draw(st.booleans()):
        pieces = draw(st.permutations(pieces))
    return draw(st.integers(1, 6)), frame_bytes, pool_bytes, pieces


@given(frames(), st.data())
def test_filling_a_frame_with_any_pieces_gives_bytes_and_checksum_of_two_passes(frame, data):
    count, frame_bytes, pool_bytes, pieces = frame
    ids = data.draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    pool = random_records(8, pool_bytes)
    check_gather(pool, ids, [RecordPiece(p, f, n) for p, f, n in pieces], frame_bytes)


@given(frames(), st.data())
def test_emptying_any_rows_gives_the_same_bytes_and_the_checksum_of_all_rows(frame, data):
    count, frame_bytes, pool_bytes, pieces = frame
    rows = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    ids = data.draw(st.permutations(range(8)))[: len(rows)]
    # At the sink the pieces are put one behind the other, since the pieces of `frames` may overlap
    # in the pool.
    offsets = accumulate((n for _, _, n in pieces), initial=0)
    apart = [RecordPiece(f, at, n) for (_, f, n), at in zip(pieces, offsets, strict=False)]
    sink_bytes = max(pool_bytes, frame_bytes)
    check_scatter(random_records(count, frame_bytes), rows, apart, (8, sink_bytes), ids)


def test_the_checksum_covers_the_final_bytes_of_overlapping_pieces():
    pool = random_records(4)
    check_gather(pool, [2, 0, 3], [RecordPiece(0, 0, 4096), RecordPiece(100, 512, 1024)], 4096)


def test_a_frame_with_gaps_is_refused():
    wide, pool = np.zeros((4, 8192), np.uint8), random_records(4)
    for frame in (wide[:, :4096], wide[::2]):
        with pytest.raises(ValueError, match="side by side"):
            gather_records(frame, pool, [0, 1], whole())
        with pytest.raises(ValueError, match="side by side"):
            scatter_records(pool, [0, 1], frame, [0, 1], whole())
    assert not wide.any()


def test_out_of_bounds_is_refused_before_anything_is_written():
    frame, pool = np.zeros((2, 4096), np.uint8), random_records(4)
    before = pool.copy()
    for ids, pieces in (([0, 4], whole()), ([0, 1, 2], whole()), ([0, 1], whole(4097))):
        with pytest.raises(IndexError, match="record"):
            gather_records(frame, pool, ids, pieces)
    for rows, ids in (([0, 2], [0, 1]), ([0, 1], [0, -1])):
        with pytest.raises(IndexError, match="record"):
            scatter_records(pool, ids, frame, rows, whole())
    assert not frame.any()
    assert np.array_equal(pool, before)


@pytest.mark.usefixtures("_only_native")
def test_several_threads_fill_frames_at_once():
    pool = random_records(64)
    found = {}

    def fill(seed):
        frame = np.zeros((48, 4096), np.uint8)
        ids = [int(i) for i in np.random.default_rng(seed).permutation(64)[:48]]
        found[seed] = (
            {gather_records(frame, pool, ids, whole()) for _ in range(50)},
            xxh3(pool[ids]),
        )

    threads = [threading.Thread(target=fill, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert len(found) == 4
    assert all(checksums == {expected} for checksums, expected in found.values())


@pytest.mark.parametrize("travels_as", [None, KVFormat.BF16, KVFormat.INT8], ids=str)
def test_both_ends_of_a_wire_compute_the_same_checksum(travels_as):
    layout = KVLayout(16, KVFormat.FP32, (KVSection(2, 2, 64),))
    identity = Identity("m", layout, kv_wire_dtype=travels_as)
    wire = agree(identity, identity)
    elements = np.random.default_rng(3).standard_normal((6, layout.block_bytes // 4))
    source = elements.astype(np.float32).view(np.uint8)
    records = np.zeros((3, wire.record_bytes), np.uint8)
    assert pack(wire, source, [4, 1, 5], records) == xxh3(records)
    sinks = np.zeros((2, 6, layout.block_bytes), np.uint8)
    assert unpack(wire, records, [0, 2], sinks[0], [3, 0]) == xxh3(records)
    assert unpack(wire, records, [], sinks[1], []) == xxh3(records)
    assert sinks[0][[3, 0]].any(axis=1).all()
    assert not sinks[0][[1, 2, 4, 5]].any()
    assert not sinks[1].any()
    if travels_as is None:
        assert np.array_equal(sinks[0][[3, 0]], source[[4, 5]])
