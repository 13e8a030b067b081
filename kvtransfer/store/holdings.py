"""All blocks of a store: in memory, in its lower tiers, and being loaded into memory.

Sinks read memory only. A block of a lower tier is first loaded into a slot of memory. Several
leases and prefetches may wait for one load.

Each addition of a block to a medium, and each removal, is recorded as an event for gateways. A
lower tier that is off counts as empty until it works again, but its shelf does not change.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.worker.block_events import LOWER_MEDIA, Medium
from engine.worker.blocks import BlockHash, BlockId, CacheEvent, Evicted, Stored
from kvtransfer.store.events import EraseAll, EraseBlock, LoadBlock
from kvtransfer.store.eviction.seam import Link
from kvtransfer.store.shelf import Shelf

# Faults of a single block. After another fault, e.g. of the whole disk, the block may still exist
# there.
BLOCK_FAULTS = ("damaged", "short", "not_held", "missing")


@dataclass(frozen=True, slots=True)
class Load:
    """A block that is being loaded into memory."""

    medium: Medium
    slot: BlockId
    place: BlockId  # the slot in the lower tier, leased until the load ends
    parent: BlockHash | None
    begun_s: float


class Holdings:
    """The shelves of a store. Other code may change only the leases and copies of slots."""

    def __init__(self, shelves: Mapping[Medium, Shelf]) -> None:
        """`shelves` contains a shelf for memory, and one for each lower tier in use."""
        self.shelves = dict(shelves)
        self.memory = shelves[Medium.HOST]
        self.loads: dict[BlockHash, Load] = {}  # running loads by block, oldest first
        self.num_loads: Counter[Medium] = Counter()  # number of blocks being loaded, by medium
        # reason why a tier is off, by medium; only tiers that are off
        self.off: dict[Medium, str] = {}
        self.counters: Counter[str] = Counter()
        self._news: list[CacheEvent] = []

    # ------------------------------------------------------------ questions

    def __contains__(self, block: object) -> bool:
        return any(block in shelf for shelf in self.shelves.values())

    def medium_of(self, block: BlockHash) -> Medium | None:
        """Returns the fastest medium that has a block now, or None."""
        if block in self.memory:
            return Medium.HOST
        for medium in LOWER_MEDIA:
            if medium in self.shelves and medium not in self.off and block in self.shelves[medium]:
                return medium
        return None

    def num_leading(self, blocks: Sequence[BlockHash]) -> int:
        """Returns the number of leading blocks that are on some medium."""
        for number, block in enumerate(blocks):
            if block not in self.loads and self.medium_of(block) is None:
                return number
        return len(blocks)

    def pop_events(self) -> list[CacheEvent]:
        """Returns the events since the last call, in order."""
        news, self._news = self._news, []
        return news

    # ------------------------------------------------------------ memory

    def take(self, num: int) -> list[BlockId]:
        """Takes up to `num` slots of memory to write to; fewer if too many slots are in use."""
        slots, evicted = self.memory.take(num)
        self._news += [Evicted(block, Medium.HOST) for block in evicted]
        return slots

    def put(self, slot: BlockId, block: BlockHash, parent: BlockHash | None, now_s: float) -> bool:
        """Puts a block into a slot of memory. Returns False if the block has another slot already.

        A block that is being loaded has another slot too: leases already wait for that slot.
        """
        if block in self.loads:
            self.memory.give_back(slot)
            return False
        is_new = self.memory.put(slot, block, parent, now_s)
        if is_new:
            self._news.append(Stored(block, parent, (), Medium.HOST))
        return is_new

    def use(self, blocks: Sequence[BlockHash], now_s: float) -> None:
        """Records that a prompt reads these blocks."""
        for shelf in self.shelves.values():
            shelf.use(blocks, now_s)

    # ------------------------------------------------------------ lower tiers

    def load(self, block: BlockHash, slot: BlockId, now_s: float) -> LoadBlock:
        """Starts to load a block of a lower tier into a slot of memory that `take` returned."""
        medium = self.medium_of(block)
        assert medium in LOWER_MEDIA
        shelf = self.shelves[medium]
        place = shelf.find(block)
        assert place is not None
        shelf.lease([place])
        self.num_loads[medium] += 1
        self.loads[block] = Load(medium, slot, place, shelf.parent(block), now_s)
        return LoadBlock(medium, block, place, slot)

    def end_load(self, block: BlockHash, fault: str | None, now_s: float) -> list[EraseBlock]:
        """Ends a load. Removes the block from the lower tier if the lower tier has lost it."""
        load = self.loads.pop(block)
        self.num_loads[load.medium] -= 1
        shelf = self.shelves[load.medium]
        shelf.end_lease([load.place])
        if fault is None:
            self.counters[f"loaded_blocks:{load.medium}"] += 1
            self.put(load.slot, block, load.parent, now_s)
            return []
        self.counters[f"failed_loads:{load.medium}_{fault}"] += 1
        self.memory.give_back(load.slot)
        is_lost = fault in BLOCK_FAULTS and shelf.find(block) == load.place
        return self.drop_from(load.medium, block) if is_lost else []

    def written(
        self,
        medium: Medium,
        place: BlockId,
        block: BlockHash,
        parent: BlockHash | None,
        now_s: float,
    ) -> None:
        """Adds a block that was written to a lower tier."""
        if self.shelves[medium].put(place, block, parent, now_s) and medium not in self.off:
            self._news.append(Stored(block, parent, (), medium))

    def take_place(self, medium: Medium) -> BlockId | None:
        """Takes a slot of a lower tier to write to; None if all slots are in use."""
        slots, evicted = self.shelves[medium].take(1)
        if medium not in self.off:
            self._news += [Evicted(block, medium) for block in evicted]
        return slots[0] if slots else None

    def drop_from(self, medium: Medium, block: BlockHash) -> list[EraseBlock]:
        """Removes a block from one tier."""
        place = self.shelves[medium].drop(block)
        if place is None:
            return []
        if medium not in self.off:
            self._news.append(Evicted(block, medium))
        return [] if medium is Medium.HOST else [EraseBlock(medium, block, place)]

    def drop_all(self, medium: Medium) -> list[EraseAll]:
        """Removes all blocks from one tier."""
        shelf = self.shelves[medium]
        blocks = [block for block, _ in shelf.links()]
        for block in blocks:
            shelf.drop(block)
        if medium not in self.off:
            self._news += [Evicted(block, medium) for block in blocks]
        return [] if medium is Medium.HOST else [EraseAll(medium)]

    def add(self, medium: Medium, shelf: Shelf) -> None:
        """Adds a lower tier that could not be used before, with its blocks."""
        assert medium not in self.shelves
        self.shelves[medium] = shelf
        self._news += [Stored(block, parent, (), medium) for block, parent in shelf.links()]

    def turn(self, medium: Medium, fault: str | None) -> None:
        """Turns a lower tier off because of `fault`, or on again if `fault` is None."""
        if (medium in self.off) == (fault is not None):
            return
        links = self.shelves[medium].links()
        if fault is not None:
            self.off[medium] = fault
            self._news += [Evicted(block, medium) for block, _ in links]
        else:
            del self.off[medium]
            self._news += [Stored(block, parent, (), medium) for block, parent in links]

    def list_all(self, medium: Medium, links: Sequence[Link], now_s: float) -> None:
        """Sets the blocks of a lower tier from a listing, up to its number of slots."""
        there = {block for block, _ in links}
        for block, _ in self.shelves[medium].links():
            if block not in there:
                self.drop_from(medium, block)
        for block, parent in links:
            if block in self.shelves[medium]:
                continue
            place = self.take_place(medium)
            if place is None:
                return
            self.written(medium, place, block, parent, now_s)

    def validate(self) -> None:
        """Asserts the invariants of shelves and loads."""
        for shelf in self.shelves.values():
            shelf.validate()
        assert not any(block in self.memory for block in self.loads)
        assert +self.num_loads == Counter(load.medium for load in self.loads.values())
