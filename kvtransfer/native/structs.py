"""Structures of `src/transfer`, field by field.

The structures contain addresses of arrays, which the caller must keep alive.
"""

from ctypes import Structure, c_int64, c_void_p

import numpy as np
import numpy.typing as npt


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


class Cipher(Structure):
    """Functions of libsodium: see `kvtransfer.native.stream`."""

    _fields_ = (("seal", c_void_p), ("open", c_void_p))


class Received(Structure):
    """The result of one receive call on a stream."""

    _fields_ = (("note", c_void_p), ("note_bytes", c_int64), ("num_records", c_int64))


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
