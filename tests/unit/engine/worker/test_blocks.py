"""The block pool: the form of a hash, and errors.

`tests.props.test_engine_blocks` tests the free list, prefix matches and holders.
"""

from hashlib import blake2b

import numpy as np
import pytest

from engine.errors import OutOfBlocks
from engine.worker.blocks import BlockId, BlockPool, hash_block, hash_blocks


def test_a_hash_is_blake2b_of_the_parent_and_the_ids_in_four_bytes_each():
    parent = hash_block(None, [1, 2])
    data = parent + np.array([3, 2**32 - 1], "<u4").tobytes()
    assert hash_block(parent, [3, 2**32 - 1]) == blake2b(data, digest_size=16).digest()


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_a_hash(num_tokens, num_hashes):
    assert len(hash_blocks(range(num_tokens), block_size=4)) == num_hashes


def test_hashing_takes_any_sequence_of_ids():
    assert hash_block(None, (1, 2)) == hash_block(None, [1, 2]) == hash_block(None, range(1, 3))


def test_an_id_that_does_not_fit_is_an_error_and_not_another_id():
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            hash_block(None, [token])


def test_asking_for_more_than_is_idle_takes_nothing():
    pool = BlockPool(6)
    pool.allocate(4)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(3)
    assert (caught.value.wanted_blocks, caught.value.free_blocks) == (3, 2)
    assert pool.num_idle == 2


@pytest.mark.parametrize("let_go", [BlockPool.disown, BlockPool.end_lease, BlockPool.end_write])
def test_releasing_a_block_that_is_not_held_is_a_bug(let_go):
    with pytest.raises(AssertionError, match="let go more often"):
        let_go(BlockPool(2), [BlockId(0)])


def test_a_misplaced_block_is_noticed():
    pool = BlockPool(2)
    pool._owned[0] = 1
    with pytest.raises(AssertionError):
        pool.validate()
