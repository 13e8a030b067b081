"""The slots of one tier of the store, in memory or on disk. Integers and hashes only.

    free ──take──> writing ──put──> cached ──(evicted by take, or dropped)──> free
                      └──give_back (the write failed)──────────────────────────┘

A cached block may be leased (a sink reads it) or copied (it is written to another tier). A slot
that is writing may be leased too: the lease grows once the block has been written. `take` returns a
slot only if the slot is not writing, not leased and not copied. At all times

    num_slots = free + cached + copied + leased + writing       (each slot is counted in the
                                                                 last state that applies)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engine.worker.blocks import BlockCounts, BlockHash, BlockId
from kvtransfer.store.eviction.seam import Eviction, Link


class Shelf:
    """The block in each slot, and the leases and copies of each slot. Owned by one thread."""

    def __init__(self, num_slots: int, eviction: Eviction) -> None:
        assert num_slots >= 0
        self.num_slots = num_slots
        self.eviction = eviction
        self._slots: dict[BlockHash, BlockId] = {}
        # the block of each slot, the reverse of `_slots`
        self._blocks: dict[BlockId, BlockHash] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._free: list[BlockId] = []  # free slots that have been used before
        self._num_touched = 0  # number of slots that have ever been used: 0 … n - 1
        self._writing: set[BlockId] = set()
        self._leased: Counter[BlockId] = Counter()
        self._copied: Counter[BlockId] = Counter()
        self.num_evicted = 0

    def __len__(self) -> int:
        """The number of blocks that `find` can find."""
        return len(self._slots)

    def __contains__(self, block: object) -> bool:
        return block in self._slots

    def find(self, block: BlockHash) -> BlockId | None:
        """Returns the slot of a block, or None if the shelf lacks the block."""
        return self._slots.get(block)

    def parent(self, block: BlockHash) -> BlockHash | None:
        """Returns the parent of a block of this shelf."""
        return self._parents[block]

    def links(self) -> list[Link]:
        """Returns all blocks with their parents, in order of their addition."""
        return list(self._parents.items())

    def grow(self, num_slots: int) -> None:
        """Adds free slots until the shelf has `num_slots` slots."""
        assert num_slots >= self.num_slots
        self.num_slots = num_slots

    # ------------------------------------------------------------ adding and removing blocks

    def take(self, num: int) -> tuple[list[BlockId], list[BlockHash]]:
        """Takes slots to write to. Returns the slots, and the blocks that were evicted from them.

        Returns fewer slots if too many slots are writing, leased or copied.
        """
        evicted: list[BlockHash] = []
        if num > self.num_free:
            evicted = self.eviction.choose(num - self.num_free, self._may_go)
            for block in evicted:
                self._remove(block)
            self.num_evicted += len(evicted)
        slots = [self._next_free() for _ in range(min(num, self.num_free))]
        self._writing.update(slots)
        return slots, evicted

    def _next_free(self) -> BlockId:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return BlockId(self._num_touched - 1)

    def put(self, slot: BlockId, block: BlockHash, parent: BlockHash | None, now_s: float) -> bool:
        """Ends a write: the slot has this block. Returns False if another slot has the block."""
        self._writing.remove(slot)
        if block in self._slots:
            self._settle(slot)
            return False
        self._slots[block], self._blocks[slot] = slot, block
        self._parents[block] = parent
        self.eviction.add(block, parent, now_s)
        return True

    def put_all(
        self,
        slots: Mapping[BlockHash, BlockId],
        parents: Mapping[BlockHash, BlockHash | None],
    ) -> None:
        """Fills an empty shelf with recovered blocks, the least recently used first.

        Both arguments have the same blocks, in the same order. Each block has its own slot.
        """
        assert not self._slots
        self._slots, self._parents = dict(slots), dict(parents)
        self._blocks = dict(zip(self._slots.values(), self._slots, strict=True))
        assert len(self._slots) == len(self._blocks) == len(self._parents)
        self._num_touched = max(self._blocks, default=-1) + 1
        assert self._num_touched <= self.num_slots
        if self._num_touched > len(self._blocks):
            touched = map(BlockId, range(self._num_touched))
            self._free = [slot for slot in touched if slot not in self._blocks]
        self.eviction.add_all(self._parents.items(), 0.0)

    def give_back(self, slot: BlockId) -> None:
        """Ends a failed write: the slot has no block, and is free unless it is leased."""
        self._writing.remove(slot)
        self._settle(slot)

    def use(self, blocks: Sequence[BlockHash], now_s: float) -> None:
        """Records that a prompt reads these blocks, first block first."""
        self.eviction.use(blocks, now_s)

    def drop(self, block: BlockHash) -> BlockId | None:
        """Removes a block. Returns its slot, which is freed once no lease or copy needs it."""
        slot = self._slots.get(block)
        if slot is not None:
            self.eviction.remove(block)
            self._remove(block)
        return slot

    # ------------------------------------------------------------ holders

    def lease(self, slots: Iterable[BlockId]) -> None:
        """Adds a lease to slots that are writing or cached."""
        self._leased.update(slots)

    def end_lease(self, slots: Iterable[BlockId]) -> None:
        """Removes a lease from these slots."""
        for slot in slots:
            self._let_go(self._leased, slot)

    def begin_copy(self, slot: BlockId) -> None:
        """Keeps a cached block in its slot until `end_copy`, for a copy to another tier.

        Several tiers may copy a block at the same time.
        """
        assert slot in self._blocks
        self._copied[slot] += 1

    def end_copy(self, slot: BlockId) -> None:
        """Ends one copy of the slot's block."""
        self._let_go(self._copied, slot)

    # ------------------------------------------------------------ questions

    @property
    def num_free(self) -> int:
        """The number of slots that have neither a block nor a lease or copy."""
        return len(self._free) + self.num_slots - self._num_touched

    def counts(self) -> BlockCounts:
        """Returns the number of slots by state, like the counts of a block pool. Copied slots count
        as owned.
        """
        writing = len(self._writing)
        leased = sum(slot not in self._writing for slot in self._leased)
        copied = sum(slot not in self._leased for slot in self._copied)
        cached = self.num_slots - self.num_free - writing - leased - copied
        return BlockCounts(self.num_free, cached, copied, leased, writing)

    def validate(self) -> None:
        """Asserts the invariants of the slots."""
        assert self.counts().total == self.num_slots
        assert len(self._slots) == len(self._blocks) == len(self._parents) == len(self.eviction)
        assert all(self._blocks[slot] == block for block, slot in self._slots.items())
        free = set(self._free)
        assert len(free) == len(self._free)
        held = self._writing | set(self._blocks) | set(self._leased) | set(self._copied)
        assert not free & held
        assert len(free) + len(held) == self._num_touched <= self.num_slots
        assert max(free | held, default=-1) < self._num_touched
        assert not self._writing & set(self._blocks)
        assert not self._writing & set(self._copied)
        assert min((*self._leased.values(), *self._copied.values()), default=1) > 0

    def _may_go(self, block: BlockHash) -> bool:
        slot = self._slots[block]
        return slot not in self._leased and slot not in self._copied

    def _remove(self, block: BlockHash) -> None:
        slot = self._slots.pop(block)
        del self._blocks[slot], self._parents[block]
        self._settle(slot)

    def _let_go(self, holders: Counter[BlockId], slot: BlockId) -> None:
        holders[slot] -= 1
        assert holders[slot] >= 0, f"slot {slot} is let go more often than it was held"
        if not holders[slot]:
            del holders[slot]
            self._settle(slot)

    def _settle(self, slot: BlockId) -> None:
        """Frees a slot if it has no block, lease or copy."""
        is_held = slot in self._writing or slot in self._leased or slot in self._copied
        if not is_held and slot not in self._blocks:
            self._free.append(slot)
