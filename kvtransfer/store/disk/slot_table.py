"""The block in each slot on disk, according to the slots' headers.

When a store starts, one scan of the table of headers finds the blocks on disk. Payloads are not
read here. A payload is verified each time it is read.
"""

from collections import Counter

import numpy as np

from engine.messages import HASH_BYTES
from kvtransfer.store.disk.format import (
    HEADER,
    Checksums,
    DiskGeometry,
    HeaderVerdict,
    RecoveredBlocks,
    claimed,
    judge,
    merged,
    unsealed_header,
)
from kvtransfer.store.disk.slabs import SlabFiles


class SlotTable:
    """The block in each slot on disk, according to the slot's header."""

    def __init__(self, geometry: DiskGeometry) -> None:
        self._geometry = geometry
        self._is_held = np.zeros(geometry.max_slots, np.bool_)
        self._hashes = np.zeros(geometry.max_slots, f"V{HASH_BYTES}")
        self._checksums = np.zeros(geometry.max_slots, np.uint64)
        self._next_sequence = 1
        self.num_used = 0  # number of the highest slot ever written, plus one

    def adopt(self, blocks: RecoveredBlocks) -> None:
        """Adds the blocks that a recovery found."""
        self._is_held[blocks.slots] = True
        self._hashes[blocks.slots] = blocks.hashes
        self._checksums[blocks.slots] = blocks.checksums
        if len(blocks):
            self._next_sequence = int(blocks.sequences[-1]) + 1
            self.num_used = int(blocks.slots.max()) + 1

    def is_held(self, slot: int) -> bool:
        """True if the slot has a block."""
        return bool(self._is_held[slot])

    def has(self, slot: int, block_hash: bytes) -> bool:
        """True if the slot has this block."""
        return self._hashes[slot].tobytes() == block_hash and self.is_held(slot)

    def checksum(self, slot: int) -> int:
        """Returns the checksum of a block's payload."""
        return int(self._checksums[slot])

    def drop(self, slot: int) -> None:
        """Removes the block of a slot."""
        self._is_held[slot] = False

    def drop_all(self) -> None:
        """Removes all blocks from the table."""
        self._is_held[:] = False

    def keep(self, slot: int, block_hash: bytes, checksum: int) -> None:
        """Adds a block that has been written."""
        self._is_held[slot] = True
        self._hashes[slot] = np.void(block_hash)
        self._checksums[slot] = checksum

    def header(self, slot: int, block_hash: bytes, parent: bytes | None) -> bytes:
        """Returns the header of a block that is about to be written."""
        self.num_used = max(self.num_used, slot + 1)
        sequence = self._next_sequence
        self._next_sequence += 1
        return unsealed_header(
            self._geometry, slot, block_hash=block_hash, parent=parent, sequence=sequence
        )


NO_BLOCKS = claimed(np.empty(0, HEADER))


def recover(
    files: SlabFiles, geometry: DiskGeometry, checksums: Checksums
) -> tuple[RecoveredBlocks, Counter[str]]:
    """Returns the blocks on disk, and the number of skipped entries by reason.

    Raises OSError if the table cannot be read.
    """
    pieces, verdicts = [NO_BLOCKS], np.zeros(len(HeaderVerdict), np.int64)
    for first_slot, headers in files.headers():
        found = judge(headers, first_slot, geometry, checksums)
        pieces.append(claimed(headers[found == HeaderVerdict.FINE]))
        verdicts += np.bincount(found, minlength=len(HeaderVerdict))
    blocks = merged(pieces)
    verdicts[HeaderVerdict.DUPLICATE] = verdicts[HeaderVerdict.FINE] - len(blocks)
    skipped = Counter({verdict.name.lower(): int(verdicts[verdict]) for verdict in HeaderVerdict})
    del skipped["fine"], skipped["empty"]
    return blocks, +skipped
