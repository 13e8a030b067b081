"""The disk engine in Python: threads read and write, on hosts without a compiler or io_uring.

The engine takes the same steps as the C++ engine, and is its reference in tests. System calls,
large copies and checksums run without the interpreter's lock.
"""

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from engine.clock import MonotonicClock
from kvtransfer.store.disk.engine import (
    DAMAGED,
    SHORT,
    DiskOperation,
    DiskOutcome,
    DiskVerb,
    EngineFiles,
    Row,
)
from kvtransfer.store.disk.format import (
    ALIGNMENT,
    EMPTY,
    HEADER_BYTES,
    disk_checksum,
    sealed_header,
)

NUM_THREADS = 4

_Call = Callable[[int, list[memoryview], int], int]  # type of os.preadv and os.pwritev


class ThreadEngine:
    """A DiskEngine on Python threads. Call `open` first, and nothing after `close`."""

    def __init__(self, files: EngineFiles) -> None:
        self._files = files
        self._arrivals: SimpleQueue[DiskOperation | None] = SimpleQueue()
        self._outcomes: deque[DiskOutcome] = deque()
        self._lock = threading.Lock()  # guards the fields below, and the rows of reads
        self._cancelled: set[int] = set()
        self._is_closing = False
        self._is_abandoned = False
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Starts the threads. The process can exit even if a thread hangs in the kernel."""
        for number in range(min(NUM_THREADS, self._files.depth)):
            thread = threading.Thread(target=self._run, name=f"disk-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, operations: Sequence[DiskOperation]) -> None:
        """Submits operations. The outcome of each operation follows later."""
        for operation in operations:
            self._arrivals.put(operation)

    def reap(self) -> list[DiskOutcome]:
        """Returns the outcomes that have become known since the last call."""
        found: list[DiskOutcome] = []
        while self._outcomes:
            found.append(self._outcomes.popleft())
        with self._lock:
            self._cancelled.difference_update(outcome.tag for outcome in found)
        return found

    def cancel(self, tag: int) -> None:
        """Cancels an operation: a read no longer writes to its row, a write leaves no header."""
        with self._lock:
            self._cancelled.add(tag)

    def close(self, timeout_s: float) -> bool:
        """Waits for submitted operations. Returns False if they have not ended in time."""
        with self._lock:
            self._is_closing = True
        for _ in self._threads:
            self._arrivals.put(None)
        if _join(self._threads, timeout_s):
            return True
        with self._lock:
            self._is_abandoned = True
        return False

    def _run(self) -> None:
        buffer = np.frombuffer(mmap.mmap(-1, self._files.stride_bytes), np.uint8)
        while (operation := self._arrivals.get()) is not None:
            error, checksum = self._do(operation, buffer)
            self._outcomes.append(DiskOutcome(operation.tag, error, checksum))
            os.eventfd_write(self._files.done_fd, 1)

    def _do(self, operation: DiskOperation, buffer: Row) -> tuple[int, int]:
        """Performs an operation. Returns its error, and the checksum of a written payload."""
        if self._is_abandoned:
            return errno.ECANCELED, 0
        try:
            match operation.verb:
                case DiskVerb.READ:
                    return self._read(operation, buffer), 0
                case DiskVerb.WRITE:
                    return self._write(operation, buffer)
                case DiskVerb.CLEAR:
                    return self._write_header(operation, EMPTY), 0
        except OSError as error:
            return error.errno or errno.EIO, 0

    def _read(self, operation: DiskOperation, buffer: Row) -> int:
        assert operation.row is not None, "a read has a row"
        if error := _move(os.preadv, operation, buffer):
            return error
        payload = buffer[: self._files.block_bytes]
        if disk_checksum(payload.data) != operation.checksum:
            return DAMAGED
        with self._lock:
            if self._is_closing or operation.tag in self._cancelled:
                return errno.ECANCELED
            operation.row[:] = payload
        return 0

    def _write(self, operation: DiskOperation, buffer: Row) -> tuple[int, int]:
        assert operation.row is not None, "a write has a row"
        if error := self._write_header(operation, EMPTY):
            return error, 0
        buffer[: self._files.block_bytes] = operation.row
        buffer[self._files.block_bytes :] = 0
        checksum = disk_checksum(buffer.data[: self._files.block_bytes])
        if error := _move(os.pwritev, operation, buffer):
            return error, 0
        with self._lock:
            if self._is_abandoned or operation.tag in self._cancelled:
                return errno.ECANCELED, 0
        return self._write_header(operation, sealed_header(operation.header, checksum)), checksum

    def _write_header(self, operation: DiskOperation, header: bytes) -> int:
        written = os.pwrite(self._files.table_fd, header, operation.table_offset)
        return 0 if written == HEADER_BYTES else SHORT


def _move(call: _Call, operation: DiskOperation, buffer: Row) -> int:
    """Reads or writes the whole slot. Returns 0 or SHORT. Raises OSError."""
    done = 0
    while done < len(buffer):
        moved = call(operation.slab_fd, [buffer.data[done:]], operation.offset + done)
        done += moved
        if done < len(buffer) and (moved == 0 or moved % ALIGNMENT):
            return SHORT
    return 0


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Waits for threads. Returns False if one of them does not end in time."""
    clock = MonotonicClock()
    deadline_s = clock.now_s() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - clock.now_s()))
    return not any(thread.is_alive() for thread in threads)
