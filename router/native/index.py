"""All workers' cached blocks by hash, fed by the workers' events of stored and evicted blocks.

One walk along a prompt finds what all workers hold. A block takes some forty bytes, however long
the names of its workers are. The index takes in a million block events a second.

Workers are numbered by *slots*, of which there are 65,535. The first eight bytes of a hash are its
key. Two of ten million blocks share a key with a chance of 10⁻⁵. Then a worker may be asked for a
block that it does not hold; it answers so and computes it.

Events come late and may be lost. A worker that has sent none since it was added or cleared is
credited with the blocks that it was seen to use, as many as fit into its pool. Its first event ends
that.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence, Set
from weakref import finalize

from engine.errors import BatonError
from engine.messages import HASH_BYTES, WorkerId
from engine.native.library import NONE, library
from engine.worker.blocks import BlockHash


class TooManyWorkers(BatonError):
    """The index has more workers than it can tell apart."""


class PrefixIndex:
    """The blocks that each worker holds. Unknown workers and repeated events are ignored.

    Raises BuildError. The seed keeps clients from choosing prompts whose
    blocks crowd one place of the table. No answer depends on it.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._core = library()
        self.handle: int = self._core.baton_index_open(seed)  # for a `Fleet`
        finalize(self, self._core.baton_index_close, self.handle)
        self.slots: dict[WorkerId, int] = {}
        self.names: list[WorkerId | None] = []  # by slot
        self._num_blocks: dict[WorkerId, int] = {}
        # For workers without events: the blocks last seen in use, latest last.
        self._seen: dict[WorkerId, OrderedDict[BlockHash, None]] = {}
        self._found = array("i")  # slot and blocks of each worker

    @property
    def workers(self) -> Set[WorkerId]:
        """Workers that were added and not forgotten."""
        return self.slots.keys()

    @property
    def num_blocks(self) -> int:
        """Different blocks. Blocks of lost workers are counted until a walk meets them."""
        return int(self._core.baton_index_num_blocks(self.handle))

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return int(self._core.baton_index_num_bytes(self.handle))

    def num_held(self, worker_id: WorkerId) -> int:
        """Blocks that a worker is thought to hold."""
        return int(self._core.baton_index_num_held(self.handle, self.slots[worker_id]))

    def add(self, worker_id: WorkerId, num_blocks: int) -> None:
        """Adds a worker with a pool of `num_blocks`, of which nothing is known yet.

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
        """Removes a worker and all that it held."""
        slot = self.slots.pop(worker_id, None)
        if slot is None:
            return
        self.names[slot] = None
        del self._num_blocks[worker_id]
        self._seen.pop(worker_id, None)
        self._core.baton_index_forget(self.handle, slot)

    def record(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes that a worker was seen to hold these leading blocks of a prompt.

        It is credited with the latest blocks that fit into its pool. A worker that sends events
        gets no such credit: it may have evicted these blocks, and would not publish that again.
        """
        seen = self._seen.get(worker_id)
        if seen is None:
            return
        for block_hash in reversed(hashes):  # like the pool, it drops the end of a prefix first
            seen[block_hash] = None
            seen.move_to_end(block_hash)
        self._store(worker_id, hashes)
        surplus = len(seen) - self._num_blocks[worker_id]
        if surplus > 0:
            self._remove(worker_id, [seen.popitem(last=False)[0] for _ in range(surplus)])

    def retract(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes that a worker was asked for these blocks and did not hold them.

        A worker that publishes events is left as it is. It may have stored the blocks since, and
        would not publish that again.
        """
        seen = self._seen.get(worker_id)
        if seen is None:
            return
        for block_hash in hashes:
            seen.pop(block_hash, None)
        self._remove(worker_id, hashes)

    def stored(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes a worker's event: it holds these blocks.

        The block before them is not needed: a hash covers all that precedes it.
        """
        if worker_id in self._seen:
            self._hear(worker_id)
        self._store(worker_id, hashes)

    def removed(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes a worker's event: it no longer holds these blocks."""
        if worker_id in self._seen:
            self._hear(worker_id)
        self._remove(worker_id, hashes)

    def cleared(self, worker_id: WorkerId) -> None:
        """Forgets all blocks of a worker, which then has published nothing yet."""
        slot = self.slots.get(worker_id)
        if slot is None:
            return
        self._core.baton_index_clear(self.handle, slot)
        self._seen[worker_id] = OrderedDict()

    def longest(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns how many leading blocks each worker holds, without workers that hold none."""
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
        """Asserts that names and slots match, and that C++ finds its table sound. Slow."""
        assert {name: slot for slot, name in enumerate(self.names) if name} == self.slots
        assert self._num_blocks.keys() == self.slots.keys() >= self._seen.keys()
        assert self._core.baton_index_is_sound(self.handle)
        for worker_id, seen in self._seen.items():
            assert len(seen) <= self._num_blocks[worker_id]
            assert len(seen) == self.num_held(worker_id)

    def _hear(self, worker_id: WorkerId) -> None:
        """Replaces the blocks that a worker was seen to use, when its first event comes."""
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
    """Joins hashes of blocks. Raises ValueError if one has another length."""
    packed = b"".join(hashes)
    if len(packed) != HASH_BYTES * len(hashes):
        raise ValueError(f"{len(hashes)} hashes of {HASH_BYTES} bytes came as {len(packed)} bytes")
    return packed
