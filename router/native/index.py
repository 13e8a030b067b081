"""All workers' cached blocks by hash, updated by the workers' events of stored and evicted blocks.

One walk along a prompt finds the blocks that all workers have. A block takes some forty bytes,
however long the names of its workers are. The index handles a million block events per second.

Workers are numbered by *slots*, of which there are 65,535. The first eight bytes of a hash are its
key. Among ten million blocks, two share a key with a probability of 10⁻⁵. Then a worker may be
asked for a block that it does not have; it reports this and computes the block.

A worker has its blocks in one pool, and its events name no medium. A store has blocks in memory, on
disk and as objects, and a block may be on several of these. In the index, a store's own name stands
for its blocks in memory. There is a further name for each lower medium.

Events are delayed and may be lost. Until the first event of a worker, the index assumes that it has
cached the blocks of its latest requests, as many as fit into its pool.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence, Set
from weakref import finalize

from engine.errors import BatonError
from engine.messages import HASH_BYTES, WorkerId
from engine.native.library import NONE, library
from engine.worker.block_events import Medium
from engine.worker.blocks import BlockHash

SEPARATOR = "|"  # not allowed in the name of a worker (`router.links`)


def name_on(store_id: WorkerId, medium: str) -> WorkerId:
    """Returns the index's name for a store's blocks on a medium."""
    return store_id if medium == Medium.HOST else WorkerId(f"{store_id}{SEPARATOR}{medium}")


class TooManyWorkers(BatonError):
    """There is no free slot for another worker."""


class PrefixIndex:
    """The blocks that each worker has. Unknown workers and repeated events are ignored.

    Raises BuildError. The seed prevents clients from choosing prompts whose blocks collide in the
    table. No answer depends on the seed.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._core = library()
        self.handle: int = self._core.baton_index_open(seed)  # for a `Fleet`
        finalize(self, self._core.baton_index_close, self.handle)
        self.slots: dict[WorkerId, int] = {}
        self.names: list[WorkerId | None] = []  # names of workers, by slot
        self._num_blocks: dict[WorkerId, int] = {}
        # For workers without events: the latest blocks of their requests, latest last.
        self._seen: dict[WorkerId, OrderedDict[BlockHash, None]] = {}
        self._found = array("i")  # slot and number of blocks of each worker

    @property
    def workers(self) -> Set[WorkerId]:
        """The number of workers in the index."""
        return self.slots.keys()

    @property
    def num_blocks(self) -> int:
        """The number of distinct blocks. Blocks of lost workers count until a walk finds them."""
        return int(self._core.baton_index_num_blocks(self.handle))

    @property
    def num_bytes(self) -> int:
        """The size of the table in bytes."""
        return int(self._core.baton_index_num_bytes(self.handle))

    def num_held(self, worker_id: WorkerId) -> int:
        """Returns the number of blocks that the index has for a worker."""
        return int(self._core.baton_index_num_held(self.handle, self.slots[worker_id]))

    def add(self, worker_id: WorkerId, num_blocks: int) -> None:
        """Adds a worker whose pool has room for `num_blocks`. No cached blocks are known yet.

        Raises TooManyWorkers.
        """
        self.remove(worker_id)
        slot = self._core.baton_index_add(self.handle)
        if slot == NONE:
            raise TooManyWorkers(f"{len(self.slots)} workers are known already")
        if slot == len(self.names):
            self.names.append(None)
            self._found.extend((0, 0))
        self.names[slot] = worker_id
        self.slots[worker_id] = slot
        self._num_blocks[worker_id] = num_blocks
        self._seen[worker_id] = OrderedDict()

    def remove(self, worker_id: WorkerId) -> None:
        """Removes a worker and all its blocks."""
        slot = self.slots.pop(worker_id, None)
        if slot is None:
            return
        self.names[slot] = None
        del self._num_blocks[worker_id]
        self._seen.pop(worker_id, None)
        self._core.baton_index_forget(self.handle, slot)

    def record(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records that a worker used these leading blocks of a prompt.

        The worker is credited with the latest blocks that fit into its pool. A worker that sends
        events is not credited: it may have evicted these blocks, and would not report that again.
        """
        seen = self._seen.get(worker_id)
        if seen is None:
            return
        for block_hash in reversed(hashes):  # like the pool, this evicts the end of a prefix first
            seen[block_hash] = None
            seen.move_to_end(block_hash)
        self._store(worker_id, hashes)
        surplus = len(seen) - self._num_blocks[worker_id]
        if surplus > 0:
            self._remove(worker_id, [seen.popitem(last=False)[0] for _ in range(surplus)])

    def retract(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Records that a worker was asked for these blocks and did not have them.

        Does nothing for a worker that sends events. It may have stored the blocks since, and would
        not report that again.
        """
        seen = self._seen.get(worker_id)
        if seen is None:
            return
        for block_hash in hashes:
            seen.pop(block_hash, None)
        self._remove(worker_id, hashes)

    def stored(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Applies a worker's event: it has stored these blocks.

        The preceding block is not needed, as a hash covers all tokens before it.
        """
        if worker_id in self._seen:
            self._hear(worker_id)
        self._store(worker_id, hashes)

    def removed(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Applies a worker's event: it has evicted these blocks."""
        if worker_id in self._seen:
            self._hear(worker_id)
        self._remove(worker_id, hashes)

    def cleared(self, worker_id: WorkerId) -> None:
        """Removes all blocks of a worker. From then on it counts as a worker without events."""
        slot = self.slots.get(worker_id)
        if slot is None:
            return
        self._core.baton_index_clear(self.handle, slot)
        self._seen[worker_id] = OrderedDict()

    def longest(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns each worker's number of leading blocks; workers without any are left out."""
        address, _ = self._found.buffer_info()
        packed = pack(hashes)
        count = self._core.baton_index_longest(self.handle, packed, len(hashes), address)
        pairs = self._found[: 2 * count]
        names = self.names
        return {
            name: num_blocks
            for slot, num_blocks in zip(pairs[::2], pairs[1::2], strict=True)
            if (name := names[slot]) is not None
        }

    def validate(self) -> None:
        """Asserts that names and slots match, and that the table in C++ is consistent. Slow."""
        assert {name: slot for slot, name in enumerate(self.names) if name} == self.slots
        assert self._num_blocks.keys() == self.slots.keys() >= self._seen.keys()
        assert self._core.baton_index_is_sound(self.handle)
        for worker_id, seen in self._seen.items():
            assert len(seen) <= self._num_blocks[worker_id]
            assert len(seen) == self.num_held(worker_id)

    def _hear(self, worker_id: WorkerId) -> None:
        """Removes the credited blocks of a worker when its first event arrives."""
        del self._seen[worker_id]
        self._core.baton_index_clear(self.handle, self.slots[worker_id])

    def _store(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        slot = self.slots.get(worker_id)
        if slot is not None:
            self._core.baton_index_store(self.handle, slot, pack(hashes), len(hashes))

    def _remove(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        slot = self.slots.get(worker_id)
        if slot is not None:
            self._core.baton_index_remove(self.handle, slot, pack(hashes), len(hashes))


def pack(hashes: Sequence[BlockHash]) -> bytes:
    """Joins hashes of blocks. Raises ValueError if a hash has another length."""
    packed = b"".join(hashes)
    if len(packed) != HASH_BYTES * len(hashes):
        raise ValueError(f"{len(hashes)} hashes of {HASH_BYTES} bytes came as {len(packed)} bytes")
    return packed
