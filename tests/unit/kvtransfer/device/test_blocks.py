"""The byte ranges that a device copies."""

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.device.blocks import Rows, copies, merged
from kvtransfer.device.cuda_driver import DeviceCopy
from kvtransfer.records import RecordPiece

ids = st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)
PIECES = (RecordPiece(0, 0, 8), RecordPiece(8, 8, 8), RecordPiece(32, 16, 16))
WHOLE = (RecordPiece(0, 0, 64),)


def bytes_moved(found):
    return {(to + i, source + i) for to, source, num in found for i in range(num)}


@given(ids, ids, st.sampled_from([PIECES, WHOLE]))
def test_merged_copies_move_the_same_bytes(there, here, pieces):
    num = min(len(there), len(here))
    each = list(copies(pieces, Rows(1000, 64, there), Rows(5000, 64, here), num))
    found = list(merged(each))
    assert len(each) == num * len(pieces)
    assert bytes_moved(found) == bytes_moved(each)
    assert len(found) <= len(each)


def test_neighbours_on_both_sides_are_one_copy():
    found = merged(copies(WHOLE, Rows(1000, 64, [2, 3, 5]), Rows(0, 64, [0, 1, 2]), 3))
    assert list(found) == [DeviceCopy(0, 1128, 128), DeviceCopy(128, 1320, 64)]


def test_rows_without_ids_are_in_order():
    assert [Rows(100, 10).row(i) for i in range(3)] == [100, 110, 120]
    assert Rows(100, 10, [7]).row(0) == 170


def test_nothing_is_no_copy():
    assert list(merged(copies(WHOLE, Rows(0, 64, []), Rows(0, 64, []), 0))) == []
