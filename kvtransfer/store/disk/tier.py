"""Blocks in fixed slots on disk: written, read and removed by slot number.

The tier does not decide which blocks are worth keeping: the caller chooses the slot of each block.
One thread calls all methods, and only `open` and `close` block. `fd` becomes readable when `poll`
has outcomes to return.

Guarantees after a crash, without any fdatasync:

    the process dies       each block whose write has been reported is on disk. A block whose write
                           was in flight is complete, or its slot is empty
    the machine dies       blocks of the last seconds may be lost. A payload that did not reach the
                           disk does not match the checksum in its header, so its read fails

Operations on one slot run in the order of the calls. A fault of the disk is a failed request with a
reason, never an exception. After several failures in a row the tier is off for a growing pause.
Then each request fails at once, except one trial per pause.

The reasons are: an errno's name; `short` (the file ends early), `damaged` (the bytes differ from
those written), `timeout`, `off` (the tier is off), `no_slot` (the slot is not allocated),
`not_held` (the slot has another block), `cleared` (all blocks were removed during the write).
"""

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.messages import HASH_BYTES
from kvtransfer.store.disk.engine import (
    DAMAGED,
    DiskEngine,
    DiskHealth,
    DiskOperation,
    DiskOutcome,
    DiskVerb,
    EngineFiles,
    Row,
    reason_of,
)
from kvtransfer.store.disk.format import (
    ALIGNMENT,
    EMPTY,
    HEADER_BYTES,
    DiskGeometry,
    RecoveredBlocks,
)
from kvtransfer.store.disk.growth import SlabGrowth
from kvtransfer.store.disk.slabs import SLAB_BYTES, DiskUnusable, SlabFiles
from kvtransfer.store.disk.slot_table import NO_BLOCKS, SlotTable, recover
from kvtransfer.store.disk.threads import ThreadEngine
from kvtransfer.store.disk.uring import UringEngine, UringUnavailable, header_checksums

log = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20  # bytes of requests in flight, unless blocks are very large
FEWEST_UNDER_WAY = 2
# tiers that were closed, but whose engines may still use rows in memory
_abandoned: list["DiskTier"] = []


@dataclass(frozen=True, slots=True)
class DiskTuning:
    """The settings of a disk tier: its load, its timeouts, and when it is turned off."""

    depth: int = 32  # largest number of requests in flight
    timeout_s: float = 10.0  # longest time until a request's outcome, seconds
    most_failures: int = 8  # failures in a row that turn the disk off
    pause_s: float = 1.0  # first pause of a disk that is turned off, seconds
    most_pause_s: float = 60.0
    slab_bytes: int = SLAB_BYTES  # if this size changes, blocks on disk are not recovered
    with_uring: bool = True

    def health(self, most_failures: int) -> DiskHealth:
        """Returns a new DiskHealth with these settings."""
        return DiskHealth(most_failures, pause_s=self.pause_s, most_pause_s=self.most_pause_s)


@dataclass(frozen=True, slots=True, eq=False)
class DiskRead:
    """Reads the block of a slot into `row`. A failed read does not change `row`."""

    slot: int
    block_hash: bytes
    row: Row


@dataclass(frozen=True, slots=True, eq=False)
class DiskWrite:
    """Writes `row` to a slot, whose block it replaces. `row` must not change during the write."""

    slot: int
    block_hash: bytes
    row: Row
    parent: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DiskDone:
    """The outcome of a request; `reason` is None if the request succeeded."""

    request: DiskRead | DiskWrite
    reason: str | None


@dataclass(slots=True, eq=False)
class _Flight:
    """A request, or the clearing of a header, from submission until its outcome."""

    tag: int
    verb: DiskVerb
    slot: int
    request: DiskRead | DiskWrite | None = None
    deadline_s: float = 0.0
    is_late: bool = False  # True once the request's timeout has been reported


class DiskTier:
    """The blocks of one identity (16 bytes) in one directory. Call `open` before all else.

    Raises ValueError if `block_bytes` or `max_bytes` leave no slot.
    """

    def __init__(
        self,
        directory: Path,
        *,
        identity: bytes,
        block_bytes: int,
        max_bytes: int,
        tuning: DiskTuning | None = None,
    ) -> None:
        self._tuning = tuning or DiskTuning()
        self._geometry = _geometry(identity, block_bytes, max_bytes, self._tuning.slab_bytes)
        self._directory = directory
        self._files = SlabFiles(directory, self._geometry)
        self._health = self._tuning.health(self._tuning.most_failures)
        self._engine: DiskEngine
        self._growth: SlabGrowth
        self._fd = -1
        self._depth = max(
            FEWEST_UNDER_WAY, min(self._tuning.depth, BUFFER_BYTES // self._geometry.stride_bytes)
        )
        self._counters: Counter[str] = Counter()

        self._table = SlotTable(self._geometry)
        self._next_tag = 0
        self._flights: dict[int, _Flight] = {}  # requests by tag, oldest first
        # requests by slot; the engine performs the first request of each slot
        self._queues: dict[int, deque[_Flight]] = {}
        # operations that are ready for submission to the engine
        self._ready: list[DiskOperation] = []
        self._done: list[DiskDone] = []
        self._is_clearing = False

    def open(self, now_s: float) -> RecoveredBlocks:
        """Opens the files and returns the blocks on disk, the oldest first.

        Raises DirectoryInUse, and DiskUnusable if the directory cannot be used at all.
        """
        self._files.open()
        try:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            self._files.close()
            raise DiskUnusable(self._directory, error) from error
        health = self._tuning.health(most_failures=1)
        self._growth = SlabGrowth(self._files, self._fd, health, self._counters)
        self._growth.open_known(now_s)
        if not self._files.is_direct:
            self._fall_back("no_direct", "the file system does without direct I/O")
        self._engine = _open_engine(
            self._files, self._fd, self._depth, self._fall_back if self._tuning.with_uring else None
        )
        blocks = _recovered(self._files, self._geometry, self._counters)
        self._table.adopt(blocks)
        self._counters["recovered"] += len(blocks)
        return blocks

    def close(self, timeout_s: float) -> bool:
        """Stops the tier. After this returns, no row is written to. Unanswered requests get no
        outcome.

        Waits for operations in flight. Returns False if the disk hangs for longer than `timeout_s`.
        Then this process keeps the files open and the directory locked.
        """
        is_ended = self._engine.close(timeout_s) and self._growth.close(timeout_s)
        if is_ended:
            self._files.close()
            os.close(self._fd)
        else:
            self._counters["abandoned"] += 1
            _abandoned.append(self)
            log.warning("%s is left open: the disk hangs", self._directory)
        return is_ended

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when `poll` has work."""
        return self._fd

    @property
    def num_slots(self) -> int:
        """The number of allocated slots, from slot 0 on. The number grows with each new slab."""
        return self._files.num_slots

    @property
    def max_slots(self) -> int:
        """The largest possible number of slots."""
        return self._geometry.max_slots

    @property
    def room(self) -> int:
        """The number of requests that are accepted now."""
        if self._is_clearing:
            return 0
        return max(0, self._depth - len(self._flights) - len(self._done))

    @property
    def shortage(self) -> str | None:
        """The reason why there are fewer slots than wanted; None if there are enough."""
        return None if self._files.is_whole else self._growth.fault

    @property
    def off_reason(self) -> str | None:
        """The reason of the last failure while the disk is off; None while it is on."""
        return self._health.off_reason

    @property
    def is_off(self) -> bool:
        """True while the disk is off."""
        return self._health.off_reason is not None

    @property
    def counters(self) -> Mapping[str, float]:
        """Counters since the start, by `name` or `name:reason`."""
        return dict(self._counters)

    def read(self, requests: Sequence[DiskRead], now_s: float) -> int:
        """Starts as many of these requests as `room` allows. Returns their number."""
        return self._accept(DiskVerb.READ, requests, now_s)

    def write(self, requests: Sequence[DiskWrite], now_s: float) -> int:
        """Starts as many of these requests as `room` allows. Returns their number."""
        return self._accept(DiskVerb.WRITE, requests, now_s)

    def remove(self, slot: int, now_s: float) -> None:
        """Clears the header of a slot, so that its block is not recovered."""
        if self._table.is_held(slot) or slot in self._queues:
            self._table.drop(slot)
            self._enqueue(self._flight(DiskVerb.CLEAR, slot), now_s)
            self._hand_over()

    def clear(self) -> None:
        """Removes all blocks. Headers are cleared once the requests in flight have ended.

        Until the headers are cleared, the tier has no room for other requests.
        """
        self._table.drop_all()
        self._is_clearing = True
        self._empty_if_idle()

    def poll(self, now_s: float) -> list[DiskDone]:
        """Returns the outcomes of requests that have ended since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        for outcome in self._engine.reap():
            self._take(outcome, now_s)
        self._expire(now_s)
        self._growth.follow(self._table.num_used, self._geometry.slab_slots, now_s)
        self._hand_over()
        self._empty_if_idle()
        done, self._done = self._done, []
        return done

    def _accept(
        self, verb: DiskVerb, requests: Sequence[DiskRead] | Sequence[DiskWrite], now_s: float
    ) -> int:
        accepted = requests[: self.room]
        for request in accepted:
            _check(request, verb, self._geometry)
            flight = self._flight(verb, request.slot)
            flight.request, flight.deadline_s = request, now_s + self._tuning.timeout_s
            self._enqueue(flight, now_s)
        self._hand_over()
        if self._done:  # some requests have failed without the engine
            os.eventfd_write(self._fd, 1)
        return len(accepted)

    def _flight(self, verb: DiskVerb, slot: int) -> _Flight:
        flight = _Flight(self._next_tag, verb, slot)
        self._next_tag += 1
        self._flights[flight.tag] = flight
        return flight

    def _enqueue(self, flight: _Flight, now_s: float) -> None:
        queue = self._queues.setdefault(flight.slot, deque())
        queue.append(flight)
        if len(queue) == 1:
            self._start(flight, now_s)

    def _start(self, flight: _Flight, now_s: float) -> None:
        """Submits the first request of a slot to the engine, or ends it with a reason."""
        reason = self._refusal(flight, now_s)
        if reason is not None:
            self._end(flight, reason, now_s)
        else:
            self._ready.append(self._operation(flight))

    def _refusal(self, flight: _Flight, now_s: float) -> str | None:
        if flight.is_late:
            return "timeout"
        if flight.slot >= self.num_slots:
            return "no_slot"
        if isinstance(flight.request, DiskRead) and not self._table.has(
            flight.request.slot, flight.request.block_hash
        ):
            return "not_held"
        if not self._health.admits(now_s):
            return "off"
        return None

    def _operation(self, flight: _Flight) -> DiskOperation:
        slot, request, header, checksum = flight.slot, flight.request, EMPTY, 0
        if isinstance(request, DiskRead):
            checksum = self._table.checksum(slot)
        else:
            self._table.drop(slot)
        if isinstance(request, DiskWrite):
            header = self._table.header(slot, request.block_hash, request.parent)
        slab_fd, offset = self._files.slab_place(slot)
        return DiskOperation(
            tag=flight.tag,
            verb=flight.verb,
            table_offset=slot * HEADER_BYTES,
            slab_fd=slab_fd,
            offset=offset,
            row=None if request is None else request.row,
            header=header,
            checksum=checksum,
        )

    def _hand_over(self) -> None:
        if self._ready:
            self._engine.submit(self._ready)
            self._ready = []

    def _take(self, outcome: DiskOutcome, now_s: float) -> None:
        """Ends the request to which an outcome belongs."""
        flight = self._flights[outcome.tag]
        if outcome.error in (0, DAMAGED):  # in these cases the disk itself works
            self._succeeded()
        elif not flight.is_late:
            self._failed(reason_of(outcome.error), now_s)
        reason = reason_of(outcome.error) if outcome.error else None
        if reason is None and flight.verb is DiskVerb.WRITE:
            reason = self._keep(flight, outcome.checksum)
        elif outcome.error == DAMAGED:
            self._table.drop(flight.slot)
            self._clear_next(flight)
        self._end(flight, reason, now_s)

    def _keep(self, flight: _Flight, checksum: int) -> str | None:
        """Records a written block, unless the write exceeded its timeout."""
        assert flight.request is not None, "a write has a request"
        if flight.is_late:  # the caller may have changed the row during the write
            self._clear_next(flight)
            return "timeout"
        if self._is_clearing:
            return "cleared"
        self._table.keep(flight.slot, flight.request.block_hash, checksum)
        return None

    def _clear_next(self, flight: _Flight) -> None:
        """Clears the slot's header before the slot's next operation."""
        self._queues[flight.slot].insert(1, self._flight(DiskVerb.CLEAR, flight.slot))

    def _end(self, flight: _Flight, reason: str | None, now_s: float) -> None:
        """Ends the first request of a slot, and starts the next one."""
        del self._flights[flight.tag]
        if not flight.is_late:
            self._report(flight, reason)
        queue = self._queues[flight.slot]
        queue.popleft()
        if queue:
            self._start(queue[0], now_s)
        else:
            del self._queues[flight.slot]

    def _report(self, flight: _Flight, reason: str | None) -> None:
        if reason is not None:
            self._counters[f"errors:{reason}"] += 1
        else:
            verb = flight.verb.name.lower()
            self._counters[f"{verb}s"] += 1
            if flight.request is not None:
                self._counters[f"{verb}_bytes"] += self._geometry.block_bytes
        if flight.request is not None:
            self._done.append(DiskDone(flight.request, reason))

    def _expire(self, now_s: float) -> None:
        """Reports requests past their timeout. Slots stay busy until the engine's outcome."""
        for flight in self._flights.values():
            if flight.request is None or flight.is_late:
                continue
            if flight.deadline_s > now_s:
                return
            self._engine.cancel(flight.tag)
            self._failed("timeout", now_s)
            self._report(flight, "timeout")
            flight.is_late = True

    def _succeeded(self) -> None:
        if self.is_off:
            log.info("%s is in use again", self._directory)
        self._health.succeeded()

    def _failed(self, reason: str, now_s: float) -> None:
        if self._health.failed(reason, now_s):
            self._counters["offs"] += 1
            log.warning("%s is off: %s", self._directory, reason)

    def _empty_if_idle(self) -> None:
        if not self._is_clearing or self._flights:
            return
        self._is_clearing = False
        self._table.drop_all()
        self._table.num_used = 0
        _empty(self._files, self._counters)

    def _fall_back(self, reason: str, message: str) -> None:
        self._counters[f"fallbacks:{reason}"] += 1
        log.warning("%s: blocks are read and written in a slower way: %s", self._directory, message)


def _empty(files: SlabFiles, counters: Counter[str]) -> None:
    """Clears all headers on disk."""
    try:
        files.empty_table()
    except OSError as error:
        counters[f"errors:{reason_of(error.errno or 0)}"] += 1
        log.warning("%s is not cleared, blocks may come back: %s", files.directory, error)


def _recovered(files: SlabFiles, geometry: DiskGeometry, counters: Counter[str]) -> RecoveredBlocks:
    try:
        blocks, skipped = recover(files, geometry, header_checksums)
    except OSError as error:
        counters[f"errors:{reason_of(error.errno or 0)}"] += 1
        log.warning("%s: no block is recovered: %s", files.directory, error)
        return NO_BLOCKS
    for verdict, number in skipped.items():
        counters[f"skipped:{verdict}"] += number
    return blocks


def _check(request: DiskRead | DiskWrite, verb: DiskVerb, geometry: DiskGeometry) -> None:
    """Raises ValueError if the caller's request is invalid."""
    row = request.row
    if row.dtype != np.uint8 or row.shape != (geometry.block_bytes,):
        raise ValueError(f"a row of {row.dtype} {row.shape} is no block")
    if not row.flags.c_contiguous or (verb is DiskVerb.READ and not row.flags.writeable):
        raise ValueError("a row must be contiguous, and writable to be read into")
    if len(request.block_hash) != HASH_BYTES or not 0 <= request.slot < geometry.max_slots:
        raise ValueError(f"slot {request.slot}, a hash of {len(request.block_hash)} bytes")


def _open_engine(
    slabs: SlabFiles, done_fd: int, depth: int, fall_back: Callable[[str, str], None] | None
) -> DiskEngine:
    """Opens an io_uring engine, or a thread engine if io_uring is unavailable or not wanted.

    `fall_back` is called with the reason why io_uring is unavailable. If `fall_back` is None,
    io_uring is not wanted.
    """
    files = EngineFiles(
        table_fd=slabs.table_fd,
        done_fd=done_fd,
        stride_bytes=slabs.geometry.stride_bytes,
        block_bytes=slabs.geometry.block_bytes,
        depth=depth,
    )
    if fall_back is not None:
        uring = UringEngine(files)
        try:
            uring.open()
        except UringUnavailable as error:
            fall_back(error.reason, str(error))
        else:
            return uring
    threads = ThreadEngine(files)
    threads.open()
    return threads


def _geometry(identity: bytes, block_bytes: int, max_bytes: int, slab_bytes: int) -> DiskGeometry:
    if len(identity) != HASH_BYTES or block_bytes < 1:
        raise ValueError(f"an identity of {len(identity)} bytes, blocks of {block_bytes}")
    stride_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
    max_slots = max_bytes // (stride_bytes + HEADER_BYTES)
    if max_slots < 1:
        raise ValueError(f"{max_bytes} bytes hold no block of {block_bytes}")
    return DiskGeometry(identity, block_bytes, max(1, slab_bytes // stride_bytes), max_slots)
