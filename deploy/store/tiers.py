"""The lower tiers of a store. They carry out loads and writes, and report their ends as events.

Each tier has a queue, in which loads precede writes, and measures how long loads take. `DiskShelf`
is the shell around `kvtransfer.store.disk`, and `ObjectShelf` around `kvtransfer.store.objects`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from engine.clock import Clock
from engine.worker.block_events import Medium
from engine.worker.blocks import BlockHash
from kvtransfer.memory import Blocks
from kvtransfer.store.disk.tier import DiskDone, DiskRead, DiskTier, DiskWrite
from kvtransfer.store.events import (
    BlockLoaded,
    BlockWritten,
    EraseBlock,
    LoadBlock,
    StoreEvent,
    TierGrown,
    TierListed,
    TierTurned,
    WriteBlock,
)
from kvtransfer.store.objects.manifest import SEGMENT_BLOCKS
from kvtransfer.store.objects.segments import ObjectBlock
from kvtransfer.store.objects.tier import ObjectTier, Payloads

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
LOOK_EVERY_S = 1.0  # interval at which tiers check if they have failed or work again
REFRESH_EVERY_S = 300.0  # interval of listing the objects, since other stores write too
SEGMENT_WAIT_S = 2.0  # longest wait for more blocks until an incomplete segment is written


class LoadPace:
    """The duration of loads, as means in which older loads have less weight."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._num = 0
        self.fixed_s = 0.0  # time until the first block of a burst is loaded
        self.block_s = 0.0  # time from one block of a burst to the next
        self.is_known = False

    def begin(self, now_s: float) -> None:
        """Records the start of a load."""
        if self._begun_s is None:
            self._begun_s, self._num = now_s, 0

    def end(self, now_s: float, *, is_last: bool) -> None:
        """Records the end of a load. `is_last`: no other load is in flight."""
        if self._begun_s is None:
            return
        self._num += 1
        if self._num == 1:
            self.fixed_s = self._mixed(self.fixed_s, now_s - self._begun_s)
        if is_last:
            if self._num > 1:
                each_s = (now_s - self._begun_s) / self._num
                self.block_s = self._mixed(self.block_s, each_s)
            self._begun_s, self.is_known = None, True

    def _mixed(self, before_s: float, now_s: float) -> float:
        return 0.8 * before_s + 0.2 * now_s if before_s else now_s


class LowerTier(Protocol):
    """A tier of a store below the memory tier."""

    medium: Medium
    pace: LoadPace
    most_blocks: int = 0  # maximum number of blocks after growth; 0: the tier cannot grow

    def load(self, effect: LoadBlock) -> None:
        """Queues a load, which starts once the tier has room for a request."""
        ...

    def write(self, effect: WriteBlock) -> None:
        """Queues a write, which starts once the tier has room for a request."""
        ...

    def erase(self, effect: EraseBlock) -> None:
        """Removes a block from the tier."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Returns the counters since the start, by "name" or "name:reason"."""
        ...

    def shortage(self) -> str | None:
        """Returns the reason why the tier's capacity is less than configured, or None."""
        return None

    def erase_all(self) -> None:
        """Removes all blocks from the tier."""
        ...

    async def close(self) -> None:
        """Closes the tier. Afterwards no load writes to memory."""
        ...


class DiskShelf(LowerTier):
    """The tier of blocks on a local disk."""

    def __init__(
        self,
        tier: DiskTier,
        memory: Blocks,
        *,
        clock: Clock,
        on_event: Callable[[StoreEvent], None],
    ) -> None:
        """`memory` has the slots of the memory tier. `tier` must be open."""
        self.medium = Medium.DISK
        self.most_blocks = tier.max_slots
        self.pace = LoadPace()
        self._tier = tier
        self._memory = memory
        self._clock = clock
        self._on_event = on_event
        self._loads: deque[LoadBlock] = deque()
        self._writes: deque[WriteBlock] = deque()
        # By `id` of the request. The value keeps the request alive, so its id is not reused.
        self._under_way: dict[int, tuple[DiskRead | DiskWrite, LoadBlock | WriteBlock]] = {}
        self._num_loads = 0
        self._is_off = False
        self._num_slots = tier.num_slots  # number of slots that the machine knows
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(tier.fd, self._poll)
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._check)

    def load(self, effect: LoadBlock) -> None:
        """Queues a load, which starts once the tier has room for a request."""
        self.pace.begin(self._clock.now_s())
        self._num_loads += 1
        self._loads.append(effect)
        self._submit()

    def write(self, effect: WriteBlock) -> None:
        """Queues a write, which starts once the tier has room for a request."""
        self._writes.append(effect)
        self._submit()

    def erase(self, effect: EraseBlock) -> None:
        """Removes a block from the tier."""
        self._tier.remove(effect.place, self._clock.now_s())

    def counters(self) -> Mapping[str, float]:
        """Returns the counters since the start, by name."""
        return self._tier.counters

    def shortage(self) -> str | None:
        """Returns a sentence with the usable size and the reason for it.

        None if the whole size is usable.
        """
        tier, block_bytes = self._tier, self._memory.shape[1]
        if tier.shortage is None:
            return None
        there, wanted = (num * block_bytes / 2**20 for num in (tier.num_slots, tier.max_slots))
        return f"only {there:,.0f} of {wanted:,.0f} MiB can be used: {tier.shortage}"

    def erase_all(self) -> None:
        """Removes all blocks, once the running requests have ended."""
        self._tier.clear()

    async def close(self) -> None:
        """Waits for requests in flight, and closes the tier."""
        self._timer.cancel()
        self._loop.remove_reader(self._tier.fd)
        await asyncio.to_thread(self._tier.close, CLOSE_TIMEOUT_S)

    def _submit(self) -> None:
        now_s = self._clock.now_s()
        while self._tier.room > 0 and (self._loads or self._writes):
            if self._loads:
                effect: LoadBlock | WriteBlock = self._loads.popleft()
                row = self._memory[effect.slot]
                read = DiskRead(effect.place, effect.block, row)
                self._record(read, effect)
                self._tier.read([read], now_s)
            else:
                effect = self._writes.popleft()
                row = self._memory[effect.slot]
                write = DiskWrite(effect.place, effect.block, row, effect.parent)
                self._record(write, effect)
                self._tier.write([write], now_s)

    def _record(self, request: DiskRead | DiskWrite, effect: LoadBlock | WriteBlock) -> None:
        self._under_way[id(request)] = request, effect

    def _poll(self) -> None:
        done = self._tier.poll(self._clock.now_s())
        for each in done:
            self._end(each)
        self._submit()
        self._tell_state()

    def _end(self, done: DiskDone) -> None:
        _, effect = self._under_way.pop(id(done.request))
        if isinstance(effect, LoadBlock):
            self._num_loads -= 1
            self.pace.end(self._clock.now_s(), is_last=self._num_loads == 0)
            self._on_event(BlockLoaded(self.medium, effect.block, effect.slot, done.reason))
        else:
            self._on_event(BlockWritten(self.medium, effect.block, done.reason))

    def _check(self) -> None:
        """Polls the tier regularly, so that a failed tier may try again."""
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._check)
        self._poll()

    def _tell_state(self) -> None:
        if self._tier.is_off != self._is_off:
            self._is_off = self._tier.is_off
            self._on_event(TierTurned(self.medium, self._tier.off_reason))
        if self._tier.num_slots != self._num_slots:
            self._num_slots = self._tier.num_slots
            self._on_event(TierGrown(self.medium, self._num_slots))


class ObjectShelf(LowerTier):
    """The tier of blocks in an object store.

    Writes are collected until they fill a segment, or until SEGMENT_WAIT_S has passed.
    """

    def __init__(
        self,
        tier: ObjectTier,
        memory: Blocks,
        *,
        clock: Clock,
        on_event: Callable[[StoreEvent], None],
    ) -> None:
        """Opens the tier. Raises ConfigError."""
        self.medium = Medium.OBJECT
        self.pace = LoadPace()
        self._tier = tier
        self._memory = memory
        self._clock = clock
        self._on_event = on_event
        self._loads: list[LoadBlock] = []
        self._writes: list[WriteBlock] = []
        self._num_loads = 0
        self._off: str | None = None
        self._loop = asyncio.get_running_loop()
        self._flush: asyncio.Handle | None = None
        self._gather: asyncio.TimerHandle | None = None
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._check)
        self._refreshed_s = clock.now_s()
        self._is_closed = False
        self._when_done(tier.open(), self._tell_all)

    def load(self, effect: LoadBlock) -> None:
        """Queues a load.

        All loads that are queued in one iteration of the event loop start together.
        """
        self.pace.begin(self._clock.now_s())
        self._num_loads += 1
        self._loads.append(effect)
        if self._flush is None:
            self._flush = self._loop.call_soon(self._get)

    def write(self, effect: WriteBlock) -> None:
        """Queues a write. The write starts once a segment is full, or after SEGMENT_WAIT_S."""
        self._writes.append(effect)
        if len(self._writes) >= SEGMENT_BLOCKS:
            self._put()
        elif self._gather is None:
            self._gather = self._loop.call_later(SEGMENT_WAIT_S, self._put)

    def erase(self, effect: EraseBlock) -> None:
        """Does nothing, because only whole segments are deleted, oldest first."""

    def counters(self) -> Mapping[str, float]:
        """Returns the counters since the start, by name."""
        return {**self._tier.counters(), "bytes": self._tier.num_bytes}

    def erase_all(self) -> None:
        """Deletes all objects of this store identity, including objects that other stores wrote."""
        self._tier.drop()

    async def close(self) -> None:
        """Ends all running calls. They count as failed."""
        self._is_closed = True
        self._timer.cancel()
        await asyncio.to_thread(self._tier.close)

    def _get(self) -> None:
        self._flush = None
        loads, self._loads = self._loads, []
        found = self._tier.get([load.block for load in loads])
        self._when_done(found, lambda: self._take(loads, found.result()))

    def _take(self, loads: list[LoadBlock], payloads: Payloads) -> None:
        for load in loads:
            payload = payloads.get(load.block)
            fault = None if payload is not None else "missing"
            if payload is not None:
                self._memory[load.slot] = memoryview(payload)
            self._num_loads -= 1
            self.pace.end(self._clock.now_s(), is_last=self._num_loads == 0)
            self._on_event(BlockLoaded(self.medium, load.block, load.slot, fault))

    def _put(self) -> None:
        if self._gather is not None:
            self._gather.cancel()
            self._gather = None
        writes, self._writes = self._writes[:SEGMENT_BLOCKS], self._writes[SEGMENT_BLOCKS:]
        blocks = [
            ObjectBlock(each.block, each.parent, memoryview(self._memory[each.slot]))
            for each in writes
        ]
        kept = self._tier.put(blocks)
        self._when_done(kept, lambda: self._end_writes(writes, kept.result()))

    def _end_writes(self, writes: list[WriteBlock], kept: frozenset[BlockHash]) -> None:
        for each in writes:
            fault = None if each.block in kept else "not_written"
            self._on_event(BlockWritten(self.medium, each.block, fault))

    def _when_done(self, future: "Future[T]", then: Callable[[], None]) -> None:
        def tell(_: object) -> None:
            self._loop.call_soon_threadsafe(self._unless_closed, then)

        future.add_done_callback(tell)

    def _unless_closed(self, then: Callable[[], None]) -> None:
        if not self._is_closed:
            then()

    def _check(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._check)
        off = self._tier.why_off()
        if off != self._off:
            self._off = off
            self._on_event(TierTurned(self.medium, off))
        if self._clock.now_s() - self._refreshed_s > REFRESH_EVERY_S:
            self._refreshed_s = self._clock.now_s()
            self._when_done(self._tier.refresh(), self._tell_all)

    def _tell_all(self) -> None:
        """Reports all listed blocks to the machine, because other stores write and delete blocks
        too.
        """
        links = [(entry.block_hash, entry.parent) for entry in self._tier.hashes()]
        self._on_event(TierListed(self.medium, links))
