"""The memory of a store: a slab of blocks and a table of their headers, without file names.

Slab and table are memfds of the keeper process, so they outlive the store's process. The table has
a header for each slot, as on disk (`kvtransfer.store.disk.format`). A header is cleared before its
slot is written to, and written after the block. So after `kill -9` at any moment, a complete header
belongs to a complete block. Payloads have no checksum here, since writes to memory do not tear.
"""

import logging
from collections.abc import Mapping

import numpy as np

from engine.worker.blocks import BlockHash, BlockId
from kvtransfer.memory import SharedMemory, SharedPool
from kvtransfer.store.disk.format import (
    EMPTY,
    HEADER,
    HEADER_BYTES,
    DiskGeometry,
    HeaderVerdict,
    RecoveredBlocks,
    claimed,
    judge,
    merged,
    sealed_header,
    unsealed_header,
)
from kvtransfer.store.disk.uring import header_checksums

log = logging.getLogger(__name__)

LEAST_BLOCK_BYTES = 4096  # the table has a header for each block of this size in the slab


def table_bytes(slab_bytes: int) -> int:
    """Returns the size in bytes of the table for a slab. Unwritten pages take no memory."""
    return slab_bytes // LEAST_BLOCK_BYTES * HEADER_BYTES


class StoreSlab:
    """The slots of one store identity in the slab. One thread calls all methods."""

    def __init__(
        self, slab: SharedMemory, table: SharedMemory, *, identity: bytes, block_bytes: int
    ) -> None:
        num_slots = min(len(slab.mapped) // block_bytes, len(table.mapped) // HEADER_BYTES)
        self.num_slots = num_slots
        self.pool = SharedPool(num_slots, block_bytes, slab)
        self._table = np.frombuffer(table.mapped, np.uint8)[: num_slots * HEADER_BYTES]
        self._headers = self._table.view(HEADER)
        self._geometry = DiskGeometry(identity, block_bytes, max(num_slots, 1), num_slots)
        self._slots: dict[BlockHash, BlockId] = {}
        self._next_sequence = 1

    def recover(self) -> RecoveredBlocks:
        """Returns the blocks that an earlier process left, oldest first.

        Clears the headers of all other slots.
        """
        verdicts = judge(self._headers, 0, self._geometry, header_checksums)
        found = merged([claimed(self._headers[verdicts == HeaderVerdict.FINE])])
        keep = np.zeros(self.num_slots, np.bool_)
        keep[found.slots] = True
        num_dropped = int(np.count_nonzero(~keep & (verdicts != HeaderVerdict.EMPTY)))
        if num_dropped:
            log.warning("%d slots of memory do not hold what they claim", num_dropped)
            self._table.reshape(-1, HEADER_BYTES)[~keep] = 0
        self._slots = {BlockHash(h): BlockId(s) for h, s in found.slot_by_hash().items()}
        if len(found):
            self._next_sequence = int(found.sequences[-1]) + 1
        return found

    def put(self, slot: BlockId, block: BlockHash, parent: BlockHash | None) -> None:
        """Writes the header of a slot. The block must be in the slot already."""
        unsealed = unsealed_header(
            self._geometry, slot, block_hash=block, parent=parent, sequence=self._next_sequence
        )
        self._next_sequence += 1
        self._write(slot, sealed_header(unsealed, 0))
        self._slots[block] = slot

    def clear(self, block: BlockHash) -> None:
        """Clears the header of a block. Call this before the block's slot is written to."""
        slot = self._slots.pop(block, None)
        if slot is not None:
            self._write(slot, EMPTY)

    @property
    def slots(self) -> Mapping[BlockHash, BlockId]:
        """The slot of each block in the table."""
        return self._slots

    def close(self) -> None:
        """Unmaps the memory. The keeper still has the memory mapped by its memfds."""
        del self._table, self._headers
        self.pool.close()

    def _write(self, slot: BlockId, header: bytes) -> None:
        begin = slot * HEADER_BYTES
        self._table[begin : begin + HEADER_BYTES] = np.frombuffer(header, np.uint8)
