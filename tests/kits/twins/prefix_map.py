"""The prefixes that each worker holds, according to one gateway.

Workers publish the blocks that they store and evict. For a worker that publishes nothing, the
gateway infers blocks from placed work: a worker that computed or pulled a prompt holds its full
blocks. The gateway then does not learn of evictions or of other gateways' work. So each worker is
credited only with its most recently used blocks, up to the size of its pool. A wrong guess costs
one request for a prefix that is not there.

Sources: cache-aware placement, Qin et al., Mooncake, FAST 2025, §6; the block hashes are those of
`engine.worker.blocks`.
"""

from collections import OrderedDict
from collections.abc import Sequence, Set
from itertools import takewhile

from engine.messages import WorkerId
from engine.worker.blocks import BlockHash


class PrefixMap:
    """The blocks that each worker last used, by hash, most recent last."""

    def __init__(self) -> None:
        self._held: dict[WorkerId, OrderedDict[BlockHash, None]] = {}
        self._num_blocks: dict[WorkerId, int] = {}

    @property
    def workers(self) -> Set[WorkerId]:
        """Returns the workers that were added and not removed."""
        return self._held.keys()

    def add(self, worker_id: WorkerId, num_blocks: int) -> None:
        """Adds a worker with a pool of `num_blocks` whose contents are unknown."""
        self._held[worker_id] = OrderedDict()
        self._num_blocks[worker_id] = num_blocks

    def remove(self, worker_id: WorkerId) -> None:
        """Removes a worker and all its blocks."""
        self._held.pop(worker_id, None)
        self._num_blocks.pop(worker_id, None)

    def record(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records the first blocks of a prompt that a worker holds. Ignores unknown workers."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for block_hash in reversed(hashes):  # like the pool, evict the end of a prefix first
            held[block_hash] = None
            held.move_to_end(block_hash)
        while len(held) > self._num_blocks[worker_id]:
            held.popitem(last=False)

    def stored(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records a worker's event that it has stored these blocks."""
        self.record(worker_id, hashes)

    def removed(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records a worker's event that it has evicted these blocks."""
        self.retract(worker_id, hashes)

    def cleared(self, worker_id: WorkerId) -> None:
        """Removes all blocks of a worker."""
        if worker_id in self._held:
            self._held[worker_id].clear()

    def retract(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Removes blocks of a worker that was asked for these blocks and does not hold them."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for block_hash in hashes:
            held.pop(block_hash, None)

    def longest(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns the number of leading blocks that each worker holds, without workers that hold
        none."""
        if not hashes:
            return {}
        return {
            worker_id: sum(1 for _ in takewhile(held.__contains__, hashes))
            for worker_id, held in self._held.items()
            if hashes[0] in held
        }

    def validate(self) -> None:
        """Asserts that no worker is credited with more blocks than its pool has."""
        assert set(self._held) == set(self._num_blocks)
        for worker_id, held in self._held.items():
            assert len(held) <= self._num_blocks[worker_id]
