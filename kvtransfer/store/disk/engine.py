"""The interface of disk engines, which move blocks between rows of memory and slots on disk.

An engine works on its own threads. There are three operations:

    write    clear the header, write the payload, write the header with its checksums
    read     read the payload, verify its checksum, copy it to the row
    clear    clear the header

A failed read does not change its row. There are two engines: io_uring in C++ (`uring.py`), and
Python threads (`threads.py`), which need neither a compiler nor io_uring.

`DiskHealth` decides when a disk is off: after several failures in a row, for a growing pause.

    fine ── `most_failures` in a row ──> off ── pause over: one trial ──> fine again
                                          ^── trial fails: double pause ──┘

Pure: the time is an argument.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.store.disk.format import EMPTY

Row = npt.NDArray[np.uint8]  # shape [block_bytes], contiguous

SHORT, DAMAGED = -1, -2  # error codes of ours beside errno: see disk.h
_OWN_REASONS = {SHORT: "short", DAMAGED: "damaged"}


class DiskVerb(IntEnum):
    """The kind of operation on a slot."""

    READ = 0
    WRITE = 1
    CLEAR = 2


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """The files that an engine uses, and the largest number of its concurrent operations
    (`depth`).
    """

    table_fd: int
    done_fd: int  # an eventfd, which the engine signals when outcomes are available
    stride_bytes: int
    block_bytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class DiskOperation:
    """One operation on a slot. The caller submits at most one operation per slot at a time."""

    tag: int
    verb: DiskVerb
    table_offset: int  # offset of the slot's header in the table, in bytes
    slab_fd: int = -1
    offset: int = 0  # offset of the slot in its slab file, in bytes
    row: Row | None = None
    header: bytes = EMPTY  # for a write: the new header without checksums
    checksum: int = 0  # for a read: the expected checksum


@dataclass(frozen=True, slots=True)
class DiskOutcome:
    """The outcome of an operation: 0, errno, SHORT or DAMAGED, and the checksum of a written
    payload.
    """

    tag: int
    error: int
    checksum: int


class DiskEngine(Protocol):
    """Runs operations concurrently, in any order. Only `close` blocks."""

    def submit(self, operations: Sequence[DiskOperation]) -> None:
        """Submits operations. The outcome of each operation follows later."""

    def reap(self) -> list[DiskOutcome]:
        """Returns the outcomes that have become known since the last call."""

    def cancel(self, tag: int) -> None:
        """Cancels an operation: a read no longer writes to its row, a write leaves no header.

        After this returns, the caller may reuse the row. The operation's outcome still follows.
        """

    def close(self, timeout_s: float) -> bool:
        """Waits for submitted operations. After this returns, the engine writes to no row.

        Returns False if operations have not ended in time. In this case no header is written any
        more, but the files must stay open and the rows must stay in memory.
        """


def reason_of(error: int) -> str:
    """Returns the name of an error for counters."""
    return _OWN_REASONS.get(error) or errno.errorcode.get(error, f"errno_{error}")


class DiskHealth:
    """Turns a disk off after failures in a row. `off_reason` is None while the disk is on."""

    def __init__(self, most_failures: int, *, pause_s: float = 1.0, most_pause_s: float = 60.0):
        self.off_reason: str | None = None
        self._most_failures = most_failures
        self._shortest_pause_s = pause_s
        self._most_pause_s = most_pause_s
        self._pause_s = pause_s
        self._retry_at_s = 0.0
        self._failures = 0
        self._is_trying = False

    def admits(self, now_s: float) -> bool:
        """Returns True if the disk may be used now: it is on, or the next trial is due."""
        if self.off_reason is None:
            return True
        if self._is_trying or now_s < self._retry_at_s:
            return False
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        """Records a success of the disk."""
        self.off_reason = None
        self._failures = 0
        self._is_trying = False
        self._pause_s = self._shortest_pause_s

    def failed(self, reason: str, now_s: float) -> bool:
        """Records a failure. Returns True if this failure turns the disk off."""
        self._failures += 1
        if self.off_reason is None:
            if self._failures < self._most_failures:
                return False
            self.off_reason = reason
            self._retry_at_s = now_s + self._pause_s
            return True
        if self._is_trying:  # only the trial counts, not failures of earlier requests
            self.off_reason = reason
            self._is_trying = False
            self._pause_s = min(2 * self._pause_s, self._most_pause_s)
            self._retry_at_s = now_s + self._pause_s
        return False
