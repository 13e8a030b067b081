"""Classic eviction policies, as peers. They know nothing of prefixes: a block is just a key.

| policy     | source                                                     |
|------------|------------------------------------------------------------|
| lru        |                                                            |
| arc        | Megiddo and Modha, FAST 2003                               |
| s3_fifo    | Yang et al., SOSP 2023                                     |
| w_tinylfu  | Einziger, Friedman and Manes, TOS 2017; exact counts       |
| gdsf       | Cherkasova, HP Labs 1998; all blocks have one size         |

A *peer* is told of every access, in order, and stores the block if it does not hold it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from engine.worker.blocks import BlockHash


class BlockCache(Protocol):
    """A cache of a fixed number of blocks."""

    def __contains__(self, block: object) -> bool:
        """True for a cached block."""

    def access(self, block: BlockHash) -> None:
        """Reads a block, or stores it and evicts another one."""


class BlockLru:
    """Least recently used."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._order: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._order

    def access(self, block: BlockHash) -> None:
        """See `BlockCache`."""
        self._order[block] = None
        self._order.move_to_end(block)
        if len(self._order) > self._num_blocks:
            self._order.popitem(last=False)


class BlockArc:
    """Adaptive replacement: recent blocks and frequent ones, with ghosts of both."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._share = 0.0
        self._once: OrderedDict[BlockHash, None] = OrderedDict()
        self._often: OrderedDict[BlockHash, None] = OrderedDict()
        self._left_once: OrderedDict[BlockHash, None] = OrderedDict()
        self._left_often: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._often

    def access(self, block: BlockHash) -> None:
        """See `BlockCache`."""
        if block in self:
            self._once.pop(block, None)
            self._often[block] = None
            self._often.move_to_end(block)
        elif block in self._left_once:
            step = max(1.0, len(self._left_often) / len(self._left_once))
            self._return(block, self._left_once, self._share + step)
        elif block in self._left_often:
            step = max(1.0, len(self._left_once) / len(self._left_often))
            self._return(block, self._left_often, self._share - step)
        else:
            self._store(block)

    def _return(self, block: BlockHash, ghosts: OrderedDict[BlockHash, None], share: float) -> None:
        self._share = min(max(share, 0.0), float(self._num_blocks))
        self._replace(is_often_ghost=ghosts is self._left_often)
        del ghosts[block]
        self._often[block] = None

    def _store(self, block: BlockHash) -> None:
        known_once = len(self._once) + len(self._left_once)
        known = known_once + len(self._often) + len(self._left_often)
        if known_once >= self._num_blocks:
            if len(self._once) < self._num_blocks:
                self._left_once.popitem(last=False)
                self._replace(is_often_ghost=False)
            else:
                self._once.popitem(last=False)
        elif known >= self._num_blocks:
            if known >= 2 * self._num_blocks:
                self._left_often.popitem(last=False)
            self._replace(is_often_ghost=False)
        self._once[block] = None

    def _replace(self, *, is_often_ghost: bool) -> None:
        if len(self._once) + len(self._often) < self._num_blocks:
            return
        num_once = len(self._once)
        if num_once and (num_once > self._share or (is_often_ghost and num_once == self._share)):
            block, _ = self._once.popitem(last=False)
            self._left_once[block] = None
        else:
            block, _ = self._often.popitem(last=False)
            self._left_often[block] = None


class S3Fifo:
    """Three queues: a small one for new blocks, a main one, and ghosts."""

    def __init__(self, num_blocks: int) -> None:
        self._num_small = max(num_blocks // 10, 1)
        self._num_main = num_blocks - self._num_small
        self._small: OrderedDict[BlockHash, None] = OrderedDict()
        self._main: OrderedDict[BlockHash, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._uses: dict[BlockHash, int] = {}  # of cached blocks, at most three

    def __contains__(self, block: object) -> bool:
        return block in self._uses

    def access(self, block: BlockHash) -> None:
        """See `BlockCache`."""
        if block in self._uses:
            self._uses[block] = min(self._uses[block] + 1, 3)
            return
        self._uses[block] = 0
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = None
        else:
            self._small[block] = None
        while len(self._small) + len(self._main) > self._num_small + self._num_main:
            self._evict()

    def _evict(self) -> None:
        if len(self._small) > self._num_small or not self._main:
            block, _ = self._small.popitem(last=False)
            if self._uses[block] > 1:
                self._main[block] = None
                self._uses[block] = 0
                return
            del self._uses[block]
            self._ghosts[block] = None
            if len(self._ghosts) > self._num_main:
                self._ghosts.popitem(last=False)
            return
        block, _ = self._main.popitem(last=False)
        if self._uses[block]:
            self._uses[block] -= 1
            self._main[block] = None
        else:
            del self._uses[block]


class WTinyLfu:
    """A window of one per cent before a segmented LRU that admits by frequency."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_window = max(num_blocks // 100, 1)
        self._num_protected = (num_blocks - self._num_window) * 4 // 5
        self._window: OrderedDict[BlockHash, None] = OrderedDict()
        self._probation: OrderedDict[BlockHash, None] = OrderedDict()
        self._protected: OrderedDict[BlockHash, None] = OrderedDict()
        self._counts: Counter[BlockHash] = Counter()
        self._num_counted = 0

    def __contains__(self, block: object) -> bool:
        return block in self._window or block in self._probation or block in self._protected

    def access(self, block: BlockHash) -> None:
        """See `BlockCache`."""
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > self._num_protected:
                demoted, _ = self._protected.popitem(last=False)
                self._probation[demoted] = None
        else:
            self._window[block] = None
            if len(self._window) > self._num_window:
                candidate, _ = self._window.popitem(last=False)
                self._admit(candidate)

    def _admit(self, candidate: BlockHash) -> None:
        room = self._num_blocks - self._num_window
        if len(self._probation) + len(self._protected) >= room:
            segment = self._probation or self._protected
            victim = next(iter(segment))
            if self._counts[candidate] <= self._counts[victim]:
                return
            del segment[victim]
        self._probation[candidate] = None

    def _count(self, block: BlockHash) -> None:
        self._counts[block] += 1
        self._num_counted += 1
        if self._num_counted >= 10 * self._num_blocks:
            halved = {known: count // 2 for known, count in self._counts.items() if count > 1}
            self._counts = Counter(halved)
            self._num_counted = 0


class Gdsf:
    """Greedy dual by frequency: a block's priority is its uses plus that of the last victim."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._floor = 0
        self._ticks = 0
        self._uses: dict[BlockHash, int] = {}
        self._entries: dict[BlockHash, tuple[int, int, BlockHash]] = {}
        self._heap: list[tuple[int, int, BlockHash]] = []

    def __contains__(self, block: object) -> bool:
        return block in self._uses

    def access(self, block: BlockHash) -> None:
        """See `BlockCache`."""
        self._ticks += 1
        self._uses[block] = self._uses.get(block, 0) + 1
        entry = (self._floor + self._uses[block], self._ticks, block)
        self._entries[block] = entry
        heappush(self._heap, entry)
        while len(self._uses) > self._num_blocks:
            oldest = heappop(self._heap)
            if self._entries.get(oldest[2]) == oldest:
                self._floor = oldest[0]
                del self._entries[oldest[2]], self._uses[oldest[2]]


CLASSICS: dict[str, Callable[[int], BlockCache]] = {
    "lru": BlockLru,
    "arc": BlockArc,
    "s3_fifo": S3Fifo,
    "w_tinylfu": WTinyLfu,
    "gdsf": Gdsf,
}
