"""What moves blocks between rows of memory and slots on disk, beside the caller's thread.

    write    clear the header, write the payload, write the header with its checksums
    read     read the payload, verify its checksum, copy it to the row
    clear    clear the header

A failed read leaves its row as it was. There are two engines: io_uring in C++ (`uring.py`), and
threads in Python (`threads.py`), which need neither a compiler nor io_uring.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.store.disk.format import EMPTY

Row = npt.NDArray[np.uint8]  # [block_bytes] contiguous

SHORT, DAMAGED = -1, -2  # errors that are no errno: see disk.h
_OWN_REASONS = {SHORT: "short", DAMAGED: "damaged"}


class DiskVerb(IntEnum):
    """What an operation does to its slot."""

    READ = 0
    WRITE = 1
    CLEAR = 2


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """The files that an engine works on, and how many operations it has under way at once."""

    table_fd: int
    done_fd: int  # an eventfd, which the engine signals when there are outcomes
    stride_bytes: int
    block_bytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class DiskOperation:
    """One thing to do. Two on one slot are never given to an engine at once."""

    tag: int
    verb: DiskVerb
    table_offset: int  # where the slot's header begins, in bytes
    slab_fd: int = -1
    offset: int = 0  # where the slot begins in its slab, in bytes
    row: Row | None = None
    header: bytes = EMPTY  # that a write leaves, without checksums
    checksum: int = 0  # that a read expects


@dataclass(frozen=True, slots=True)
class DiskOutcome:
    """How an operation ended: 0, an errno, SHORT or DAMAGED; the checksum of what was written."""

    tag: int
    error: int
    checksum: int


class DiskEngine(Protocol):
    """Does operations in any order, as many at once as it can. Nothing here blocks but `close`."""

    def submit(self, operations: Sequence[DiskOperation]) -> None:
        """Takes operations; each has an outcome later."""

    def reap(self) -> list[DiskOutcome]:
        """Returns the outcomes since the last call."""

    def cancel(self, tag: int) -> None:
        """Once this returns, a read writes to its row no more, and a write leaves no header.

        The caller may then use the row for something else. An outcome still comes.
        """

    def close(self, timeout_s: float) -> bool:
        """Once this returns, no row is written to any more. Waits for what was submitted.

        Returns False if that has not ended in time. No header is written then any more, but the
        files must stay open and the rows in memory.
        """


def reason_of(error: int) -> str:
    """Returns the name of an error, as counters have it."""
    return _OWN_REASONS.get(error) or errno.errorcode.get(error, f"errno_{error}")
