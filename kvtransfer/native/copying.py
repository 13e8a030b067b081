"""Copies many records in one call: from any rows of one array to any rows of another.

A frame is a sequence of records without gaps, as sent on the wire. The frame's checksum is computed
during the copy to or from the frame, so each byte is read from memory once, not twice.

The ctypes structures mirror the structures of `src/transfer`, field by field. The structures
contain addresses of arrays, which the caller must keep alive.
"""

from array import array
from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_uint64, c_void_p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from engine.native.library import library
from kvtransfer.memory import Blocks
from kvtransfer.records import RecordPiece


class Records(Structure):
    """An array of records, and the ids of the selected records."""

    _fields_ = (
        ("bytes", c_void_p),
        ("stride", c_int64),
        ("num_records", c_int64),
        ("record_bytes", c_int64),
        ("ids", c_void_p),
    )


class Heads(Structure):
    """The position of one section in records of one format."""

    _fields_ = (
        ("section_offset", c_int64),
        ("head_bytes", c_int64),
        ("token_bytes", c_int64),
        ("scales_offset", c_int64),
    )


class Section(Structure):
    """One section of two records of different formats."""

    _fields_ = (
        ("source", Heads),
        ("sink", Heads),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
    )


def records_struct(records: npt.NDArray[np.uint8], ids_address: int | None = None) -> Records:
    """Returns `records` [n, record_bytes] uint8 for C++; each record's bytes are contiguous."""
    num_records, record_bytes = records.shape
    return Records(
        bytes=records.ctypes.data,
        stride=records.strides[0],
        num_records=num_records,
        record_bytes=record_bytes,
        ids=ids_address,
    )


Ids = Sequence[int] | npt.NDArray[np.int64]
MOST_SHORT_BYTES = 240  # up to this size XXH3 is another algorithm, which xxhash computes


class _Side(NamedTuple):
    """One side of the copies: an array of records, and the ids of the rows; None for 0, 1, 2, …"""

    records: Blocks
    ids: "array[int] | None"  # 64-bit ids; faster to create than a numpy array

    @property
    def num_named(self) -> int:
        return len(self.records if self.ids is None else self.ids)


def copy_records(
    sink: Blocks,
    sink_ids: Ids | None,
    source: Blocks,
    source_ids: Ids | None,
    pieces: Sequence[RecordPiece],
) -> None:
    """Copies the pieces of each record `source_ids[i]` to the record `sink_ids[i]`.

    None stands for 0, 1, 2, …, up to the number of ids on the other side. The arrays must not
    overlap, and `sink_ids` must not repeat an id. The bytes of each record are contiguous, but
    there may be gaps between records. Other threads run meanwhile.

    Raises IndexError if an id or a piece is out of bounds. Raises ValueError if the arrays are not
    records of bytes or the sides have different numbers of ids. After an error nothing is written.
    """
    _copy("baton_copy_records", (sink, sink_ids), (source, source_ids), pieces)


class RecordCopier:
    """Copies records repeatedly between the same two arrays, like `copy_records`.

    The parts that depend only on the arrays are computed once. That saves as much time as copying
    64 KiB takes.
    """

    def __init__(self, sink: Blocks, source: Blocks, pieces: Sequence[RecordPiece]) -> None:
        """Raises ValueError if the arrays are not records of bytes."""
        _check_arrays(sink, source)
        self._arrays = sink, source
        self._pieces = pieces
        self._table = piece_table(pieces)
        self._structs = records_struct(sink), records_struct(source)
        self._sides = byref(self._structs[0]), byref(self._structs[1])
        self._function = library().baton_copy_records

    def copy(self, sink_ids: Sequence[int], source_ids: Sequence[int]) -> None:
        """Copies records. Raises IndexError or ValueError like `copy_records`."""
        to, of = _numbers(sink_ids), _numbers(source_ids)
        if len(to) == len(of):
            sink, source = self._structs
            sink.ids, source.ids = to.buffer_info()[0], of.buffer_info()[0]
            table = self._table.buffer_info()[0]
            if self._function(*self._sides, len(to), table, len(self._pieces)):
                return
        sink_records, source_records = self._arrays
        # repeats the checks, and raises the error that they find
        copy_records(sink_records, sink_ids, source_records, source_ids, self._pieces)


def gather_records(
    frame: Blocks, source: Blocks, source_ids: Ids, pieces: Sequence[RecordPiece]
) -> int:
    """Copies the pieces of each record `source_ids[i]` to record i of the frame.

    Returns the frame's checksum. Raises the errors of `copy_records`, and ValueError if the
    frame's records are not contiguous.
    """
    _check_frame(frame)
    sides = (frame, None), (source, source_ids)
    return _copy_and_hash("baton_gather_records", *sides, pieces, frame)


def scatter_records(
    sink: Blocks, sink_ids: Ids, frame: Blocks, rows: Ids, pieces: Sequence[RecordPiece]
) -> int:
    """Copies the pieces of record `rows[i]` of the frame to the record `sink_ids[i]`.

    Returns the checksum of the whole frame, not only of these rows. Raises the errors of
    `gather_records`.
    """
    _check_frame(frame)
    sides = (sink, sink_ids), (frame, rows)
    return _copy_and_hash("baton_scatter_records", *sides, pieces, frame)


def checksum(frame: bytes | memoryview) -> int:
    """Returns the xxh3-64 of a frame, which is sent with the frame."""
    return xxhash.xxh3_64_intdigest(frame)


def _copy_and_hash(
    function: str,
    sink: tuple[Blocks, Ids | None],
    source: tuple[Blocks, Ids | None],
    pieces: Sequence[RecordPiece],
    frame: Blocks,
) -> int:
    """Copies records, and returns the checksum of `frame`, which is one side of the copies."""
    if frame.nbytes <= MOST_SHORT_BYTES:
        _copy("baton_copy_records", sink, source, pieces)
        return checksum(frame.data)
    found = c_uint64()
    _copy(function, sink, source, pieces, byref(found))
    return found.value


def _copy(
    function: str,
    sink: tuple[Blocks, Ids | None],
    source: tuple[Blocks, Ids | None],
    pieces: Sequence[RecordPiece],
    *results: object,
) -> None:
    """Copies records with a C++ function. `results` are the function's further arguments."""
    _check_arrays(sink[0], source[0])
    to, of = _side(*sink), _side(*source)
    count = _count(to, of)
    table = piece_table(pieces)
    sides = byref(_struct(to)), byref(_struct(of))
    copy = getattr(library(), function)
    if copy(*sides, count, table.buffer_info()[0], len(pieces), *results):
        return
    _check_bounds(to, count, [(piece.sink_offset, piece.num_bytes) for piece in pieces])
    _check_bounds(of, count, [(piece.source_offset, piece.num_bytes) for piece in pieces])
    raise AssertionError("C++ refused copies that are within bounds")


def _side(records: Blocks, ids: Ids | None) -> _Side:
    return _Side(records, None if ids is None else _numbers(ids))


def _check_arrays(sink: Blocks, source: Blocks) -> None:
    for name, records in (("sink", sink), ("source", source)):
        if not (records.dtype == np.uint8 and records.ndim == 2 and records[:1].flags.c_contiguous):
            raise ValueError(f"the {name} is not made of records of bytes")
    if not sink.flags.writeable:
        raise ValueError("the sink is read-only")


def _check_frame(frame: Blocks) -> None:
    if not frame.flags.c_contiguous:
        raise ValueError("the frame's records do not lie side by side")


def piece_table(pieces: Sequence[RecordPiece]) -> "array[int]":
    """Returns the pieces as an array whose address is passed to C++."""
    table = array("q")
    for piece in pieces:
        table.extend((piece.source_offset, piece.sink_offset, piece.num_bytes))
    return table


def _numbers(ids: Ids) -> "array[int]":
    if isinstance(ids, np.ndarray):
        return array("q", ids.astype(np.int64, copy=False).tobytes())
    try:
        return array("q", ids)
    except OverflowError as error:
        raise IndexError(f"no record has such a number: {error}") from error


def _count(to: _Side, of: _Side) -> int:
    """Returns the number of records to copy. Raises ValueError if the sides name different
    numbers.
    """
    if to.ids is None and of.ids is not None:
        return of.num_named
    if of.ids is None and to.ids is not None:
        return to.num_named
    if to.num_named != of.num_named:
        raise ValueError(f"{to.num_named} records at the sink, {of.num_named} at the source")
    return to.num_named


def _check_bounds(side: _Side, count: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Raises IndexError if a row or range is out of bounds; `ranges` are (offset, bytes)."""
    num_records, record_bytes = side.records.shape
    for number in range(count) if side.ids is None else side.ids:
        if not 0 <= number < num_records:
            raise IndexError(f"record {number} of {num_records}")
    for offset, num_bytes in ranges:
        if not 0 <= offset <= offset + num_bytes <= record_bytes:
            raise IndexError(f"{num_bytes} bytes from {offset} on, of {record_bytes} in a record")


def _struct(side: _Side) -> Records:
    return records_struct(side.records, None if side.ids is None else side.ids.buffer_info()[0])


class Cipher(Structure):
    """The addresses of libsodium's functions for a cipher: see `kvtransfer.native.stream`."""

    _fields_ = (("seal", c_void_p), ("open", c_void_p))


class Received(Structure):
    """The result of one receive call on a stream."""

    _fields_ = (("note", c_void_p), ("note_bytes", c_int64), ("num_records", c_int64))
