"""The prefixes that each worker holds, as far as one gateway knows.

Workers publish the blocks that they store and evict. For a worker that does not, the gateway uses
what it had the worker do: a worker that computed or pulled a prompt holds its full blocks. Then the
gateway hears of no evictions, and of nothing that other gateways do. So each worker is credited
with the blocks that it was last seen to use, as many as fit into its pool. A wrong guess costs one
unanswered question.

Sources: cache-aware placement, Qin et al., Mooncake, FAST 2025, §6; the block hashes are those of
`engine.worker.blocks`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from itertools import takewhile

from engine.messages import WorkerId
from engine.worker.blocks import BlockHash, hash_blocks


class PrefixMap:
    """The blocks that each worker was last seen to use, by hash, latest last."""

    def __init__(self) -> None:
        self._held: dict[WorkerId, OrderedDict[BlockHash, None]] = {}
        self._num_blocks: dict[WorkerId, int] = {}

    @property
    def workers(self) -> Set[WorkerId]:
        """Workers that were added and not forgotten."""
        return self._held.keys()

    def add(self, worker_id: WorkerId, num_blocks: int) -> None:
        """A worker with so large a pool has come; nothing is known of it yet."""
        self._held[worker_id] = OrderedDict()
        self._num_blocks[worker_id] = num_blocks

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is gone with all it held."""
        self._held.pop(worker_id, None)
        self._num_blocks.pop(worker_id, None)

    def record(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """A worker holds these leading blocks of a prompt. Unknown workers are ignored."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for block_hash in reversed(hashes):  # like the pool, it drops the end of a prefix first
            held[block_hash] = None
            held.move_to_end(block_hash)
        while len(held) > self._num_blocks[worker_id]:
            held.popitem(last=False)

    def stored(
        self, worker_id: WorkerId, hashes: Sequence[BlockHash], parent: BlockHash | None = None
    ) -> None:
        """A worker says that it holds these blocks, the first of which follows `parent`."""
        self.record(worker_id, hashes)

    def removed(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """A worker says that it holds these blocks no longer."""
        self.retract(worker_id, hashes)

    def cleared(self, worker_id: WorkerId) -> None:
        """A worker says that it holds nothing."""
        if worker_id in self._held:
            self._held[worker_id].clear()

    def retract(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """A worker was asked for these blocks and does not hold them."""
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


class PrefixHashes:
    """Block hashes of one prompt and its answer, each computed once and only when asked for."""

    def __init__(
        self, known: Mapping[int, Sequence[BlockHash]] | None = None, *, salt: bytes = b""
    ) -> None:
        """`known` are those of the first full blocks, by block size."""
        self._salt = salt
        self._hashes = {size: list(hashes) for size, hashes in (known or {}).items()}

    def leading(
        self, token_ids: Sequence[int], *, num_tokens: int, block_size: int
    ) -> list[BlockHash]:
        """Hashes of the full blocks among the first `num_tokens`; `token_ids` may only grow."""
        num_blocks = num_tokens // block_size
        hashes = self._hashes.setdefault(block_size, [])
        if num_blocks > len(hashes):
            new = token_ids[len(hashes) * block_size : num_blocks * block_size]
            parent = hashes[-1] if hashes else None
            hashes += hash_blocks(new, block_size, self._salt, parent=parent)
        return hashes[:num_blocks]
