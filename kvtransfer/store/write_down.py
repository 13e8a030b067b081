"""Copies of blocks from a store's memory to its lower tiers.

A block is written to the disk soon after it arrives (`through`), or once a prompt has used it
(`used`), or never (`off`). Writes wait while blocks are read from the disk. A block that is evicted
from memory before its write is counted, and not written. So a slow disk never delays the store.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from engine.config import StoreWrites
from engine.worker.block_events import Medium
from engine.worker.blocks import BlockHash, BlockId
from kvtransfer.store.events import EraseBlock, StoreEffect, WriteBlock
from kvtransfer.store.holdings import Holdings

# most concurrent writes; an object segment has 64 blocks
MAX_WRITES = {Medium.DISK: 16, Medium.OBJECT: 64}
MAX_QUEUED = 262_144  # most blocks that wait for one tier; beyond that, the oldest is dropped


@dataclass(slots=True)
class _Writing:
    """A block that is being written from a slot of memory to a slot of the lower tier."""

    slot: BlockId
    place: BlockId
    parent: BlockHash | None
    is_wanted: bool = True  # False if all blocks were dropped during the write


class WriteDown:
    """The blocks that wait to be written to one lower tier, and the running writes."""

    def __init__(
        self, holdings: Holdings, medium: Medium, writes: StoreWrites, counters: Counter[str]
    ) -> None:
        self._holdings = holdings
        self.medium = medium
        self._writes = writes
        self._counters = counters
        self._queue: OrderedDict[BlockHash, None] = OrderedDict()
        self._under_way: dict[BlockHash, _Writing] = {}

    @property
    def num_waiting(self) -> int:
        """The number of blocks that are waiting or being written."""
        return len(self._queue) + len(self._under_way)

    def came(self, blocks: Collection[BlockHash]) -> None:
        """Queues blocks that are new in memory, if the store's setting is `through`."""
        if self._writes is StoreWrites.THROUGH:
            self._enqueue(blocks)

    def used(self, blocks: Collection[BlockHash]) -> None:
        """Queues blocks that a prompt uses, if the store's setting is `used`."""
        if self._writes is StoreWrites.USED:
            self._enqueue(blocks)

    def _enqueue(self, blocks: Collection[BlockHash]) -> None:
        shelf = self._holdings.shelves[self.medium]
        if self.medium in self._holdings.off:
            self._drop("tier_off", len(blocks))
            return
        for block in blocks:
            if block not in shelf and block not in self._under_way:
                self._queue[block] = None
        while len(self._queue) > MAX_QUEUED:
            self._queue.popitem(last=False)
            self._drop("queue_full", 1)

    def advance(self) -> list[StoreEffect]:
        """Starts writes as long as the tier has room."""
        holdings = self._holdings
        if self.medium in holdings.off or self._is_read():
            return []
        effects: list[StoreEffect] = []
        while self._queue and len(self._under_way) < MAX_WRITES[self.medium]:
            block, _ = self._queue.popitem(last=False)
            slot = holdings.memory.find(block)
            if slot is None:
                self._drop("evicted_first", 1)
                continue
            if block in holdings.shelves[self.medium]:
                continue
            place = holdings.take_place(self.medium)
            if place is None:
                self._drop("no_place", 1)
                continue
            holdings.memory.begin_copy(slot)
            parent = holdings.memory.parent(block)
            self._under_way[block] = _Writing(slot, place, parent)
            effects.append(WriteBlock(self.medium, block, parent, slot, place))
        return effects

    def _is_read(self) -> bool:
        """True while a block is being read from this tier, since reads have priority."""
        return self._holdings.num_loads[self.medium] > 0

    def on_written(self, block: BlockHash, fault: str | None, now_s: float) -> list[EraseBlock]:
        """Handles the end of a write."""
        writing = self._under_way.pop(block)
        place = writing.place
        self._holdings.memory.end_copy(writing.slot)
        if fault is not None:
            self._holdings.shelves[self.medium].give_back(place)
            self._counters[f"failed_writes:{self.medium}_{fault}"] += 1
            return []
        if not writing.is_wanted:
            self._holdings.shelves[self.medium].give_back(place)
            return [EraseBlock(self.medium, block, place)]
        self._counters[f"written_blocks:{self.medium}"] += 1
        self._holdings.written(self.medium, place, block, writing.parent, now_s)
        return []

    def drop_all(self) -> None:
        """Drops the waiting blocks now, and the blocks that are being written after their
        writes.
        """
        self._queue.clear()
        for writing in self._under_way.values():
            writing.is_wanted = False

    def validate(self) -> None:
        """Asserts the invariants of waiting and running writes."""
        assert len(self._under_way) <= MAX_WRITES[self.medium]

    def _drop(self, why: str, num: int) -> None:
        if num:
            self._counters[f"dropped_writes:{self.medium}_{why}"] += num
