"""The disk engine in C++: io_uring on a separate thread, without the interpreter's lock.

The ctypes structures mirror the structures of src/transfer/disk.h.
"""

import ctypes
import os
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_ubyte, c_uint64, c_void_p

import numpy as np

from engine.errors import BatonError
from engine.native.library import Native, library
from kvtransfer.store.disk.engine import DiskOperation, DiskOutcome, EngineFiles
from kvtransfer.store.disk.format import HEADER_BYTES, Headers

_REAPED = 64  # largest number of outcomes that one call returns


class NativeFiles(Structure):
    """The structure DiskFiles of disk.h."""

    _fields_ = (
        ("stride_bytes", c_int64),
        ("payload_bytes", c_int64),
        ("table_fd", c_int32),
        ("done_fd", c_int32),
        ("depth", c_int32),
    )


class NativeOperation(Structure):
    """The structure DiskOperation of disk.h."""

    _fields_ = (
        ("tag", c_uint64),
        ("offset", c_int64),
        ("table_offset", c_int64),
        ("row", c_void_p),
        ("checksum", c_uint64),
        ("slab_fd", c_int32),
        ("kind", c_int32),
        ("header", c_ubyte * HEADER_BYTES),
    )


class NativeOutcome(Structure):
    """The structure DiskOutcome of disk.h."""

    _fields_ = (("tag", c_uint64), ("checksum", c_uint64), ("error", c_int64))


class UringUnavailable(BatonError):
    """io_uring is unavailable here; `reason` is one word for counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UringEngine:
    """A DiskEngine on io_uring. Call `open` first, and nothing after `close`."""

    def __init__(self, files: EngineFiles) -> None:
        self._files = files
        self._library: Native
        self._engine = c_void_p()
        self._outcomes = (NativeOutcome * _REAPED)()

    def open(self) -> None:
        """Opens io_uring and starts the engine. Raises UringUnavailable."""
        self._library = library()
        files = NativeFiles(
            stride_bytes=self._files.stride_bytes,
            payload_bytes=self._files.block_bytes,
            table_fd=self._files.table_fd,
            done_fd=self._files.done_fd,
            depth=self._files.depth,
        )
        refused = self._library.baton_disk_open(ctypes.byref(files), ctypes.byref(self._engine))
        if refused:
            raise UringUnavailable("no_uring", f"io_uring: {os.strerror(refused)}")

    def submit(self, operations: Sequence[DiskOperation]) -> None:
        """Submits operations. The outcome of each operation follows later."""
        batch = (NativeOperation * len(operations))(*map(_native, operations))
        self._library.baton_disk_submit(self._engine, batch, len(operations))

    def reap(self) -> list[DiskOutcome]:
        """Returns the outcomes that have become known since the last call."""
        found: list[DiskOutcome] = []
        while True:
            count = self._library.baton_disk_reap(self._engine, self._outcomes, _REAPED)
            found += (
                DiskOutcome(one.tag, one.error, one.checksum) for one in self._outcomes[:count]
            )
            if count < _REAPED:
                return found

    def cancel(self, tag: int) -> None:
        """Cancels an operation: a read no longer writes to its row, a write leaves no header."""
        self._library.baton_disk_cancel(self._engine, tag)

    def close(self, timeout_s: float) -> bool:
        """Waits for submitted operations. Returns False if they have not ended in time."""
        return bool(self._library.baton_disk_close(self._engine, timeout_s))


def header_checksums(headers: Headers) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Returns the checksum of each header."""
    found = np.empty(len(headers), np.uint64)
    library().baton_disk_header_checksums(headers.ctypes.data, len(headers), found.ctypes.data)
    return found


def _native(operation: DiskOperation) -> NativeOperation:
    row = operation.row
    return NativeOperation(
        tag=operation.tag,
        offset=operation.offset,
        table_offset=operation.table_offset,
        row=None if row is None else row.ctypes.data,
        checksum=operation.checksum,
        slab_fd=operation.slab_fd,
        kind=operation.verb,
        header=(c_ubyte * HEADER_BYTES).from_buffer_copy(operation.header),
    )
