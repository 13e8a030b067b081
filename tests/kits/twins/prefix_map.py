"""The prefixes that each worker holds, as far as one gateway knows.

Workers publish the blocks that they store and evict. For a worker that does not, the gateway goes
by the work that it gave: a worker that computed or pulled a prompt holds its full blocks. Then the
gateway learns of no evictions, and not of the work that other gateways give. So each worker is
credited with the blocks that it last used, as many as fit into its pool. A wrong guess costs one
request for a prefix that is not there.

Sources: cache-aware placement, Qin et al., Mooncake, FAST 2025, §6; the block hashes are those of
`engine.worker.blocks`.
"""

from collections import OrderedDict
from collections.abc import Sequence, Set
from itertools import takewhile

from engine.messages import WorkerId
from engine.worker.blocks import BlockHash


class PrefixMap:
    """The blocks that each worker last used, by hash, latest last."""

    def __init__(self) -> None:
        self._held: dict[WorkerId, OrderedDict[BlockHash, None]] = {}
        self._num_blocks: dict[WorkerId, int] = {}

    @property
    def workers(self) -> Set[WorkerId]:
        """Workers that were added and not forgotten."""
        return self._held.keys()

    def add(self, worker_id: WorkerId, num_blocks: int) -> None:
        """Adds a worker with a pool of `num_blocks`, of which nothing is known yet."""
        self._held[worker_id] = OrderedDict()
        self._num_blocks[worker_id] = num_blocks

    def remove(self, worker_id: WorkerId) -> None:
        """Removes a worker and all that it held."""
        self._held.pop(worker_id, None)
        self._num_blocks.pop(worker_id, None)

    def record(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records leading blocks of a prompt that a worker holds. Unknown workers are ignored."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for block_hash in reversed(hashes):  # like the pool, it drops the end of a prefix first
            held[block_hash] = None
            held.move_to_end(block_hash)
        while len(held) > self._num_blocks[worker_id]:
            held.popitem(last=False)

    def stored(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records a worker's event: it holds these blocks."""
        self.record(worker_id, hashes)

    def removed(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records a worker's event: it no longer holds these blocks."""
        self.retract(worker_id, hashes)

    def cleared(self, worker_id: WorkerId) -> None:
        """Forgets all blocks of a worker."""
        if worker_id in self._held:
            self._held[worker_id].clear()

    def retract(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records that a worker was asked for these blocks and does not hold them."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for block_hash in hashes:
            held.pop(block_hash, None)

    def longest(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns how many leading blocks each worker holds, without workers that hold none."""
        if not hashes:
            return {}
        return {
            worker_id: sum(1 for _ in takewhile(held.__contains__, hashes))
            for worker_id, held in self._held.items()
            if hashes[0] in held
        }

    def validate(self) -> None:
        """Asserts that no worker is credited with more than it can hold."""
        assert set(self._held) == set(self._num_blocks)
        for worker_id, held in self._held.items():
            assert len(held) <= self._num_blocks[worker_id]
