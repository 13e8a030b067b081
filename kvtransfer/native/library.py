"""The C++ functions as Python sees them: structures, signatures, and the loaded library.

Structures mirror those of the same names in src/*.h, field by field. They hold addresses, so the
caller must keep the arrays alive.
"""

import ctypes
import logging
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import BuildError
from engine.layout import KVFormat
from engine.native_build import Sources, built_library, open_library

log = logging.getLogger(__name__)

FORMATS = {
    KVFormat.FP32: 0,
    KVFormat.BF16: 1,
    KVFormat.FP8_E4M3: 2,
    KVFormat.INT8: 3,
    KVFormat.INT4: 4,
}
SOURCES = Sources("transfer", Path(__file__).parent / "src", "transfer.cpp")


class Records(Structure):
    """An array of records, and the ids of the chosen ones."""

    _fields_ = (
        ("bytes", c_void_p),
        ("stride", c_int64),
        ("num_records", c_int64),
        ("record_bytes", c_int64),
        ("ids", c_void_p),
    )


class Heads(Structure):
    """The place of one section in records of one format."""

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
    """What a call received of a stream."""

    _fields_ = (("note", c_void_p), ("note_bytes", c_int64), ("num_records", c_int64))


_COPIES = (POINTER(Records), POINTER(Records), c_int64, c_void_p, c_int64)
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "baton_copy_records": (c_int32, _COPIES),
    "baton_gather_records": (c_int32, (*_COPIES, POINTER(c_uint64))),
    "baton_scatter_records": (c_int32, (*_COPIES, POINTER(c_uint64))),
    "baton_convert_records": (
        None,
        (
            POINTER(Section),
            c_int64,
            c_int64,
            c_int32,
            c_int32,
            POINTER(Records),
            POINTER(Records),
        ),
    ),
    "baton_wide_cipher": (c_int32, (POINTER(Cipher),)),
    "baton_stream_open": (c_void_p, (c_int32, POINTER(Cipher), c_char_p, c_int32)),
    "baton_stream_close": (None, (c_void_p,)),
    "baton_stream_note": (c_int32, (c_void_p, c_char_p, c_int64)),
    "baton_stream_send": (c_int32, (c_void_p, POINTER(Records), c_int64, c_int64, c_int32)),
    "baton_stream_receive": (
        c_int32,
        (c_void_p, POINTER(Records), c_int64, c_int64, c_int32, POINTER(Received)),
    ),
    "baton_set_word": (None, (c_void_p, c_uint64)),
    "baton_word_is": (c_int32, (c_void_p, c_uint64, c_int32)),
}


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


@cache
def kernels() -> ctypes.CDLL | None:
    """Returns the library, building it if needed; None, with a warning, if that fails."""
    try:
        return open_library(built_library(SOURCES), SIGNATURES)
    except (BuildError, OSError) as error:
        log.warning("KV is copied and converted by numpy, C++ is not available: %s", error)
        return None


def is_native() -> bool:
    """True if C++ does the work. Builds the library if that has not been tried yet."""
    return kernels() is not None
