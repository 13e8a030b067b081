"""Evicts by ARC, leaves first: it learns how much room blocks that were used twice deserve.

Blocks used once and blocks used more often have a queue each. The queue that exceeds its share
gives up its oldest leaf. A block that returns soon after it left shows which share was too small.

Source: Megiddo and Modha, ARC, FAST 2003; here a queue gives up its oldest leaf.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.hints import SessionHint
from kvtransfer.store.eviction.leaves import Forest, LeafQueue, rest
from kvtransfer.store.eviction.seam import Link, MayGo

ONCE, OFTEN = 0, 1


class LeafArc:
    """ARC for a tier of `num_blocks`. See `seam.Eviction` for the methods."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._forest = Forest()
        self._queues = (LeafQueue(self._forest), LeafQueue(self._forest))
        self._ghosts: tuple[OrderedDict[BlockHash, None], ...] = (OrderedDict(), OrderedDict())
        self._share_once = 0.0  # blocks that the queue of blocks used once deserves

    def __len__(self) -> int:
        return len(self._forest)

    def __contains__(self, block: object) -> bool:
        return block in self._forest

    def add(self, block: BlockHash, parent: BlockHash | None, now_s: float) -> None:
        """Adds a block. If it left lately, the share of the queue that it left from grows."""
        if not self._forest.add(block, parent):
            return
        once, often = self._ghosts
        if block in once:
            self._share_once += max(1.0, len(often) / len(once))
            del once[block]
        elif block in often:
            self._share_once -= max(1.0, len(once) / len(often))
            del often[block]
        else:
            self._queues[ONCE].push(block)
            return
        self._share_once = min(max(self._share_once, 0.0), float(self._num_blocks))
        self._queues[OFTEN].push(block)

    def add_all(self, links: Iterable[Link], now_s: float) -> None:
        """Adds many blocks as blocks used once."""
        self._queues[ONCE].push_all(self._forest.add_all(list(links)))

    def use(self, blocks: Sequence[BlockHash], now_s: float) -> None:
        """Moves the blocks to those used often, the first block as the most recent one."""
        for block in reversed(blocks):
            if block in self._forest:
                self._queues[ONCE].discard(block)
                self._queues[OFTEN].push(block)

    def remove(self, block: BlockHash) -> None:
        """Forgets a block. It leaves no trace."""
        if block not in self._forest:
            return
        for queue in self._queues:
            queue.discard(block)
        parent = self._forest.remove(block)
        if parent is not None:
            for queue in self._queues:
                queue.freed(parent)

    def choose(self, num_blocks: int, may_go: MayGo) -> list[BlockHash]:
        """Removes and returns victims of the queue that exceeds its share."""
        chosen: list[BlockHash] = []
        while len(chosen) < num_blocks:
            first = ONCE if len(self._queues[ONCE]) > self._share_once else OFTEN
            found = self._oldest(first, may_go) or self._oldest(1 - first, may_go)
            if found is None:
                break
            block, which = found
            self.remove(block)
            self._remember(block, which)
            chosen.append(block)
        for queue in self._queues:
            queue.restore()
        if len(chosen) < num_blocks and len(self._forest):
            others = rest(self._forest, num_blocks - len(chosen), may_go)
            for block in others:
                self.remove(block)
                chosen.append(block)
        return chosen

    def hint(self, hint: SessionHint, now_s: float) -> None:
        """Ignores the hint."""

    def validate(self) -> None:
        """Asserts that the queues hold exactly the tier's blocks, and that ghosts are bounded."""
        self._forest.validate()
        for queue in self._queues:
            queue.validate()
        assert sum(map(len, self._queues)) == len(self._forest)
        assert all(len(ghosts) <= self._num_blocks for ghosts in self._ghosts)
        assert not any(block in self._forest for ghosts in self._ghosts for block in ghosts)

    def _oldest(self, which: int, may_go: MayGo) -> tuple[BlockHash, int] | None:
        block = self._queues[which].oldest(may_go)
        return None if block is None else (block, which)

    def _remember(self, block: BlockHash, which: int) -> None:
        ghosts = self._ghosts[which]
        ghosts[block] = None
        if len(ghosts) > self._num_blocks:
            ghosts.popitem(last=False)
