"""Evicts the least recently used leaf."""

from collections.abc import Iterable, Sequence

from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.leaves import Forest, LeafQueue, rest
from kvtransfer.store.eviction.seam import Link, MayGo, SessionHint


class LeafLru:
    """Evicts the least recently used leaf first. See `seam.Eviction` for the methods."""

    def __init__(self) -> None:
        self._forest = Forest()
        self._queue = LeafQueue(self._forest)

    def __len__(self) -> int:
        return len(self._forest)

    def __contains__(self, block: object) -> bool:
        return block in self._forest

    def add(self, block: BlockHash, parent: BlockHash | None, now_s: float) -> None:
        """Adds a block as the most recently used one."""
        if self._forest.add(block, parent):
            self._queue.push(block)

    def add_all(self, links: Iterable[Link], now_s: float) -> None:
        """Adds many blocks, the least recently used first."""
        self._queue.push_all(self._forest.add_all(list(links)))

    def use(self, blocks: Sequence[BlockHash], now_s: float) -> None:
        """Marks the blocks as the most recently used ones, the first block as the latest of all."""
        for block in reversed(blocks):
            if block in self._forest:
                self._queue.push(block)

    def remove(self, block: BlockHash) -> None:
        """Removes a block from the policy."""
        if block not in self._forest:
            return
        self._queue.discard(block)
        parent = self._forest.remove(block)
        if parent is not None:
            self._queue.freed(parent)

    def choose(self, num_blocks: int, may_go: MayGo) -> list[BlockHash]:
        """Removes and returns victims: the oldest leaves that may go, then the deepest other
        blocks.
        """
        chosen: list[BlockHash] = []
        while len(chosen) < num_blocks:
            block = self._queue.oldest(may_go)
            if block is None:
                break
            self.remove(block)
            chosen.append(block)
        self._queue.restore()
        if len(chosen) < num_blocks and len(self._forest):
            others = rest(self._forest, num_blocks - len(chosen), may_go)
            for block in others:
                self.remove(block)
                chosen.append(block)
        return chosen

    def hint(self, hint: SessionHint, now_s: float) -> None:
        """Ignores the hint, since this policy uses none."""

    def validate(self) -> None:
        """Asserts that the queue holds exactly the tier's blocks."""
        self._forest.validate()
        self._queue.validate()
        assert len(self._queue) == len(self._forest)
