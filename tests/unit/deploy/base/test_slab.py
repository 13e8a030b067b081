"""The table of the slab: a later process finds exactly the blocks that were completely written."""

import random

import numpy as np
import pytest

from deploy.base.slab import StoreSlab, table_bytes
from engine.worker.blocks import BlockHash, BlockId
from kvtransfer.memory import SharedMemory
from kvtransfer.store.disk.format import HEADER_BYTES

BLOCK_BYTES = 4096
SLAB_BYTES = 64 * 2**10  # room for 16 slots
IDENTITY = bytes(range(16))


@pytest.fixture
def memory():
    slab = SharedMemory.make(SLAB_BYTES)
    table = SharedMemory.make(table_bytes(SLAB_BYTES))
    yield slab, table
    slab.close()
    table.close()


def opened(memory, identity=IDENTITY, block_bytes=BLOCK_BYTES) -> StoreSlab:
    return StoreSlab(*memory, identity=identity, block_bytes=block_bytes)


def found(slab: StoreSlab) -> dict[bytes, int]:
    return slab.recover().slot_by_hash()


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_a_new_slab_is_empty(memory):
    slab = opened(memory)
    assert slab.num_slots >= SLAB_BYTES // BLOCK_BYTES
    assert not found(slab)


def test_blocks_are_found_with_their_parents_the_oldest_first(memory):
    slab = opened(memory)
    slab.put(BlockId(3), block(1), None)
    slab.put(BlockId(0), block(2), block(1))
    slab.put(BlockId(1), block(3), block(2))
    slab.clear(block(2))
    slab.clear(block(9))  # a block that was never in the slab
    recovered = opened(memory).recover()
    assert recovered.slot_by_hash() == {block(1): 3, block(3): 1}
    assert recovered.parent_by_hash() == {block(1): None, block(3): block(2)}


def test_the_order_of_coming_goes_on_over_lives(memory):
    opened(memory).put(BlockId(5), block(5), None)
    second = opened(memory)
    second.recover()
    second.put(BlockId(1), block(1), None)
    assert list(found(opened(memory))) == [block(5), block(1)]


@pytest.mark.parametrize(
    "other", [{"identity": bytes(16)}, {"block_bytes": 2 * BLOCK_BYTES}], ids=str
)
def test_blocks_of_another_model_or_layout_are_not_found(memory, other):
    opened(memory).put(BlockId(0), block(1), None)
    assert not found(opened(memory, **other))
    assert not found(opened(memory))  # the refused entries are cleared


def test_a_damaged_header_loses_its_block_alone(memory):
    slab = opened(memory)
    for number in range(8):
        slab.put(BlockId(number), block(number), None)
    table = np.frombuffer(memory[1].mapped, np.uint8)
    rng = random.Random(1)
    for slot in (2, 5):
        place = slot * HEADER_BYTES + rng.randrange(HEADER_BYTES)
        table[place] ^= 1 << rng.randrange(8)
    del table
    assert found(opened(memory)) == {block(n): n for n in range(8) if n not in (2, 5)}
