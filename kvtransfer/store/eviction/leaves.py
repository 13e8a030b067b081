"""Data structures of all eviction policies: a tree of blocks, and queues that return leaves first.

    Forest     the cached blocks, each with the number of its cached children
    LeafQueue  some of these blocks in order of last use; returns the oldest leaf first

A queue finds the oldest leaf in amortised constant time. It examines the blocks, oldest first. A
block that has a child is set aside: the block *waits*. Once its last child leaves the tier, the
block is a candidate again, with its old age.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from operator import eq

from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.seam import Link, MayGo

SPARE = 64  # number of stale entries in a stack that are tolerated before a cleanup


class Forest:
    """The cached blocks, each with its number of cached children.

    A block may be cached before its parent is.
    """

    def __init__(self) -> None:
        self.parents: dict[BlockHash, BlockHash | None] = {}
        # number of cached children; parents that are not cached are included
        self._num_children: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def __contains__(self, block: object) -> bool:
        return block in self.parents

    def is_leaf(self, block: BlockHash) -> bool:
        """True if no cached block follows this one."""
        return block not in self._num_children

    def add(self, block: BlockHash, parent: BlockHash | None) -> bool:
        """Adds a block. Returns False, and changes nothing, if the block is already cached."""
        if block in self.parents:
            return False
        if parent == block:  # an invalid link: the block could never become a leaf
            parent = None
        self.parents[block] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        return True

    def add_all(self, links: list[Link]) -> list[BlockHash]:
        """Adds many blocks. Returns the new ones, in order."""
        known = self.parents
        fresh = dict(links)
        lies = any(map(eq, fresh.keys(), fresh.values()))
        if lies or len(fresh) != len(links) or not known.keys().isdisjoint(fresh):
            return [block for block, parent in links if self.add(block, parent)]
        known.update(fresh)
        counts = self._num_children
        for parent, num in Counter(fresh.values()).items():
            if parent is not None:
                counts[parent] = counts.get(parent, 0) + num
        return list(fresh)

    def remove(self, block: BlockHash) -> BlockHash | None:
        """Removes a block. Returns its parent if the parent is cached and has become a leaf."""
        parent = self.parents.pop(block)
        if parent is None:
            return None
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return None
        del self._num_children[parent]
        return parent if parent in self.parents else None

    def deepest_first(self) -> list[BlockHash]:
        """Returns all blocks, each before its parent."""
        depths: dict[BlockHash, int] = {}
        for block in self.parents:
            path: list[BlockHash] = []
            at: BlockHash | None = block
            while at is not None and at in self.parents and at not in depths:
                depths[at] = 0  # also ends the loop at a cycle, which only invalid parents can form
                path.append(at)
                at = self.parents[at]
            depth = depths[at] + 1 if at is not None and at in depths else 0
            for each in reversed(path):
                depths[each] = depth
                depth += 1
        return sorted(depths, key=depths.__getitem__, reverse=True)

    def validate(self) -> None:
        """Asserts that the counts of children are correct."""
        counts = Counter(parent for parent in self.parents.values() if parent is not None)
        assert counts == self._num_children


class LeafQueue:
    """Blocks of a forest in order of last use. `oldest` returns the oldest leaf."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._ticks = 0
        # Both map a block to the tick of its last use. A waiting block had a child when it was
        # examined.
        self._order: OrderedDict[BlockHash, int] = OrderedDict()
        self._waiting: dict[BlockHash, int] = {}
        # heap of waiting blocks that became leaves; an entry may be out of date
        self._freed: list[tuple[int, BlockHash]] = []
        # leaves that may not go, set aside during one choice
        self._held: list[tuple[int, BlockHash]] = []

    def __len__(self) -> int:
        return len(self._order) + len(self._waiting)

    def __contains__(self, block: object) -> bool:
        return block in self._order or block in self._waiting

    def __iter__(self) -> Iterator[BlockHash]:
        yield from self._waiting
        yield from self._order

    def push(self, block: BlockHash) -> None:
        """Adds a block as the most recently used one, or moves it to that end."""
        self._ticks += 1
        self._waiting.pop(block, None)
        self._order[block] = self._ticks
        self._order.move_to_end(block)

    def push_all(self, blocks: list[BlockHash]) -> None:
        """Adds new blocks, the least recently used first."""
        first = self._ticks + 1
        self._ticks += len(blocks)
        self._order.update(zip(blocks, range(first, self._ticks + 1), strict=True))

    def discard(self, block: BlockHash) -> None:
        """Removes a block, if the queue has it."""
        if self._order.pop(block, None) is None:
            self._waiting.pop(block, None)

    def freed(self, block: BlockHash) -> None:
        """Records that the last child of a block was removed from the tier."""
        tick = self._waiting.get(block)
        if tick is not None:
            heappush(self._freed, (tick, block))

    def oldest(self, may_go: MayGo) -> BlockHash | None:
        """Returns the least recently used leaf that may be evicted; None if there is no such leaf.

        Blocks that may not go are set aside until `restore`.
        """
        while self._freed:
            tick, block = self._freed[0]
            if self._waiting.get(block) == tick and self._forest.is_leaf(block):
                if may_go(block):
                    return block
                self._held.append((tick, block))
            heappop(self._freed)
        while self._order:
            block = next(iter(self._order))
            if self._forest.is_leaf(block) and may_go(block):
                return block
            tick = self._order.pop(block)
            self._waiting[block] = tick
            if self._forest.is_leaf(block):
                self._held.append((tick, block))
        return None

    def restore(self) -> None:
        """Puts the blocks that were set aside back, for the next choice."""
        for entry in self._held:
            heappush(self._freed, entry)
        self._held.clear()

    def validate(self) -> None:
        """Asserts that every leaf can be found, and that ticks ascend."""
        assert not self._held
        assert self._order.keys().isdisjoint(self._waiting)
        ticks = list(self._order.values())
        assert ticks == sorted(ticks)
        reachable = set(self._freed)
        for block, tick in self._waiting.items():
            assert not self._forest.is_leaf(block) or (tick, block) in reachable
        assert all(block in self._forest for block in self)


class LeafStack:
    """Blocks of a forest in order of last use. `newest` returns the newest leaf.

    Unlike a queue, a stack drops blocks with children from its end. Once the last child of a
    dropped block is removed, the block is added again.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._num_pushed = 0
        self._ticks: dict[BlockHash, int] = {}
        # (tick of last use, block); some entries are stale
        self._entries: list[tuple[int, BlockHash]] = []
        # leaves that may not go, set aside during one choice
        self._held: list[tuple[int, BlockHash]] = []

    def push(self, block: BlockHash) -> None:
        """Adds a block as the most recently used one, or moves it to that end."""
        self._num_pushed += 1
        self._ticks[block] = self._num_pushed
        self._entries.append((self._num_pushed, block))
        if len(self._entries) > 2 * len(self._ticks) + SPARE:
            self._entries = [entry for entry in self._entries if self._is_current(entry)]

    def push_all(self, blocks: list[BlockHash]) -> None:
        """Adds new blocks, the least recently used first."""
        ticks = range(self._num_pushed + 1, self._num_pushed + len(blocks) + 1)
        self._num_pushed += len(blocks)
        self._ticks.update(zip(blocks, ticks, strict=True))
        self._entries.extend(zip(ticks, blocks, strict=True))

    def discard(self, block: BlockHash) -> None:
        """Removes a block, if the stack has it."""
        self._ticks.pop(block, None)

    def freed(self, block: BlockHash) -> None:
        """Records that the last child of a block was removed from the tier."""
        tick = self._ticks.get(block)
        if tick is not None:
            entry = (tick, block)
            place = bisect_left(self._entries, entry)
            if self._entries[place : place + 1] != [entry]:
                # inserted near the end, where the entry was dropped
                self._entries.insert(place, entry)

    def newest(self, may_go: MayGo) -> BlockHash | None:
        """Returns the most recently used leaf that may be evicted; None if there is no such leaf.

        Blocks that may not go are set aside until `restore`.
        """
        while self._entries:
            block = self._entries[-1][1]
            if self._is_current(self._entries[-1]) and self._forest.is_leaf(block):
                if may_go(block):
                    return block
                self._held.append(self._entries[-1])
            self._entries.pop()
        return None

    def restore(self) -> None:
        """Puts the blocks back that were set aside."""
        for entry in reversed(self._held):
            insort(self._entries, entry)
        self._held.clear()

    def validate(self) -> None:
        """Asserts that every leaf can be found."""
        assert not self._held
        assert self._entries == sorted(set(self._entries))
        leaves = {(t, block) for block, t in self._ticks.items() if self._forest.is_leaf(block)}
        assert leaves <= set(self._entries)

    def _is_current(self, entry: tuple[int, BlockHash]) -> bool:
        return self._ticks.get(entry[1]) == entry[0]


def rest(forest: Forest, num_blocks: int, may_go: MayGo) -> Iterable[BlockHash]:
    """Returns blocks with cached children that may be evicted, the deepest first.

    Call this only if no leaf is left, because the cost grows with the size of the tier.
    """
    found = (block for block in forest.deepest_first() if may_go(block))
    return [block for block, _ in zip(found, range(num_blocks), strict=False)]
