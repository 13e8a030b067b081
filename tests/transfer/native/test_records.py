"""Copies of records copy the right bytes, and nothing outside the bounds."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.native.copying import copy_records
from kvtransfer.records import RecordPiece
from tests.kits.records import RECORD_BYTES, random_records, whole


@st.composite
def copies(draw):
    """Draws (sink's records, source's records, both sides' ids, pieces without overlap at the
    sink).
    """
    count = draw(st.integers(0, 6))
    sink_bytes, source_bytes = draw(st.integers(1, 3000)), draw(st.integers(1, 3000))
    num_sink, num_source = draw(st.integers(count, 8)), draw(st.integers(1, 8))
    sink_ids = draw(st.permutations(range(num_sink)))[:count]
    source_ids = draw(st.lists(st.integers(0, num_source - 1), min_size=count, max_size=count))
    pieces, end = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(end, sink_bytes))
        num_bytes = draw(st.integers(0, min(sink_bytes - start, source_bytes)))
        pieces.append(RecordPiece(draw(st.integers(0, source_bytes - num_bytes)), start, num_bytes))
        end = start + num_bytes
    return (num_sink, sink_bytes), (num_source, source_bytes), sink_ids, source_ids, pieces


@given(copies())
def test_any_pieces_of_any_records_arrive_and_no_other_byte_changes(copy):
    sink_shape, source_shape, sink_ids, source_ids, pieces = copy
    sink, source = random_records(*sink_shape), random_records(*source_shape, seed=1)
    expected = [bytearray(record) for record in sink]
    for sink_id, source_id in zip(sink_ids, source_ids, strict=True):
        for piece in pieces:
            part = source[source_id, piece.source_offset :][: piece.num_bytes].tobytes()
            expected[sink_id][piece.sink_offset : piece.sink_offset + piece.num_bytes] = part
    copy_records(sink, sink_ids, source, source_ids, pieces)
    assert [bytes(record) for record in sink] == expected


@pytest.mark.parametrize("num_bytes", [1, 63, 511, 512, 513, 1024, 1536, 2000, 70_000])
def test_records_of_any_size_are_copied_to_the_last_byte(num_bytes):
    source = random_records(5, num_bytes)
    sink = np.zeros((7, num_bytes), np.uint8)
    copy_records(sink, [6, 1, 2, 4], source, [0, 3, 4, 2], whole(num_bytes))
    assert np.array_equal(sink[[6, 1, 2, 4]], source[[0, 3, 4, 2]])
    assert not sink[[0, 3, 5]].any()


def test_records_are_numbered_from_zero_where_no_ids_are_given():
    source, sink = random_records(6), np.zeros((9, RECORD_BYTES), np.uint8)
    copy_records(sink, None, source, [5, 0, 2], whole())
    assert np.array_equal(sink[:3], source[[5, 0, 2]])
    assert not sink[3:].any()
    scattered = np.zeros((9, RECORD_BYTES), np.uint8)
    copy_records(scattered, np.array([8, 0, 4]), sink, None, whole())
    assert np.array_equal(scattered[[8, 0, 4]], sink[:3])
    assert not scattered[[1, 2, 3, 5, 6, 7]].any()
    copy_records(sink, None, scattered, None, whole())
    assert np.array_equal(sink, scattered)


def test_records_need_not_lie_side_by_side():
    wide, source = np.zeros((4, 3 * RECORD_BYTES), np.uint8), random_records(4)
    copy_records(wide[::2, RECORD_BYTES : 2 * RECORD_BYTES], [1, 0], source, [2, 3], whole())
    assert np.array_equal(wide[2, RECORD_BYTES : 2 * RECORD_BYTES], source[2])
    assert np.array_equal(wide[0, RECORD_BYTES : 2 * RECORD_BYTES], source[3])
    assert not wide[[1, 3]].any()
    assert not wide[:, :RECORD_BYTES].any()
    assert not wide[:, 2 * RECORD_BYTES :].any()


@pytest.mark.parametrize(
    ("sink_ids", "source_ids"),
    [
        ([0, 4], [0, 1]),
        ([0, -1], [0, 1]),
        ([0, 1], [0, 3]),
        ([0, 1], [0, -3]),
        ([0, 1], [0, 2**63]),
        ([0, -(2**70)], [0, 1]),
        (None, [0, 1, 2, 0, 1]),
        ([0, 1, 2, 3], None),
    ],
)
def test_a_record_that_is_not_there_is_refused_before_anything_is_written(sink_ids, source_ids):
    sink, source = np.zeros((4, RECORD_BYTES), np.uint8), random_records(3)
    with pytest.raises(IndexError, match="record"):
        copy_records(sink, sink_ids, source, source_ids, whole())
    assert not sink.any()


@pytest.mark.parametrize(
    "piece",
    [
        RecordPiece(0, 1, RECORD_BYTES),
        RecordPiece(1, 0, RECORD_BYTES),
        RecordPiece(-1, 0, 8),
        RecordPiece(0, -1, 8),
        RecordPiece(8, 8, -4),
        RecordPiece(0, 0, RECORD_BYTES + 1),
        RecordPiece(2**62, 0, 8),
        RecordPiece(2**63 - 1, 0, 2**63 - 1),
    ],
    ids=str,
)
def test_a_piece_that_leaves_its_record_is_refused_before_anything_is_written(piece):
    sink, source = np.zeros((4, RECORD_BYTES), np.uint8), random_records(3)
    with pytest.raises(IndexError, match="in a record"):
        copy_records(sink, [0], source, [0], [*whole(), piece])
    assert not sink.any()


def test_read_only_or_non_byte_arrays_are_refused():
    sink, source = random_records(2), random_records(2, seed=1)
    before = sink.copy()
    frozen = sink.view()
    frozen.flags.writeable = False
    for bad_sink, bad_source in (
        (frozen, source),
        (sink.astype(np.int16), source),
        (sink, source.view(np.int64)),
        (sink[0], source),
        (sink, source[:, ::2]),
    ):
        with pytest.raises(ValueError, match=r"read-only|records of bytes"):
            copy_records(bad_sink, [0], bad_source, [0], whole(8))
    for sink_ids, source_ids in (([0], [0, 1]), ([0, 1], [])):
        with pytest.raises(ValueError, match="records at the sink"):
            copy_records(sink, sink_ids, source, source_ids, whole())
    with pytest.raises(ValueError, match="records at the sink"):
        copy_records(sink, None, source[:1], None, whole())
    assert np.array_equal(sink, before)


def test_a_source_may_be_read_only():
    source, sink = random_records(2), np.zeros((2, RECORD_BYTES), np.uint8)
    source.flags.writeable = False
    copy_records(sink, None, source, None, whole())
    assert np.array_equal(sink, source)


def test_several_threads_copy_at_once():
    source = random_records(64)
    sinks = [np.zeros_like(source) for _ in range(4)]
    ids = [int(i) for i in np.random.default_rng(0).permutation(64)]
    threads = [
        threading.Thread(target=copy_records, args=(sink, ids, source, ids, whole()))
        for sink in sinks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert all(np.array_equal(sink, source) for sink in sinks)
