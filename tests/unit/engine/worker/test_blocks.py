"""The block pool: the form of a hash, holders and errors.

`tests.props.test_engine_blocks` also tests the free list and prefix matches.
"""

from hashlib import blake2b
from itertools import permutations

import numpy as np
import pytest

from engine.errors import OutOfBlocks
from engine.worker.blocks import (
    EVICT_FIRST,
    IN_FLIGHT,
    LEASED,
    LIKELY_REUSED,
    ORDINARY,
    OWNED,
    BlockCounts,
    BlockId,
    BlockPool,
    hash_block,
    hash_blocks,
)


def hashes(name: str, num_blocks: int):
    """Returns hashes of the blocks of one prompt."""
    tokens = [ord(letter) for letter in name for _ in range(2)]
    return hash_blocks((tokens * num_blocks)[: 2 * num_blocks], block_size=2)


def allocate_full(pool: BlockPool, name: str, num_blocks: int):
    """Allocates blocks for a sequence and fills them."""
    taken = pool.allocate(num_blocks)
    for block, block_hash in zip(taken, hashes(name, num_blocks), strict=True):
        pool.set_hashes([block], [block_hash])
    return taken


@pytest.fixture
def pool():
    pool = BlockPool(6)
    yield pool
    pool.validate()


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


def test_asking_for_more_than_is_idle_takes_nothing(pool):
    pool.allocate(4)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(3)
    assert (caught.value.wanted_blocks, caught.value.free_blocks) == (3, 2)
    assert pool.num_idle == 2


def test_a_shared_block_is_cached_when_the_last_sequence_lets_go(pool):
    taken = allocate_full(pool, "a", 2)
    pool.hold(OWNED, taken)
    pool.release(OWNED, taken, ORDINARY)
    assert pool.counts() == BlockCounts(free=4, cached=0, owned=2, leased=0, in_flight=0)
    pool.release(OWNED, taken, ORDINARY)
    assert pool.counts() == BlockCounts(free=4, cached=2, owned=0, leased=0, in_flight=0)


KINDS = (OWNED, LEASED, IN_FLIGHT)


@pytest.mark.parametrize("order", list(permutations(KINDS)))
def test_a_block_is_free_only_when_every_kind_of_holder_has_let_go(pool, order):
    taken = pool.allocate(2)
    pool.hold(LEASED, taken)
    pool.hold(IN_FLIGHT, taken)
    for kind in order:
        assert pool.num_idle == 4
        pool.release(kind, taken)
    assert pool.counts() == BlockCounts(free=6, cached=0, owned=0, leased=0, in_flight=0)


def test_a_block_with_several_holders_is_counted_once(pool):
    taken = pool.allocate(3)
    pool.hold(LEASED, taken[:2])
    pool.hold(IN_FLIGHT, taken[:1])
    assert pool.counts() == BlockCounts(free=3, cached=0, owned=1, leased=1, in_flight=1)
    assert pool.counts().total == 6
    pool.release(IN_FLIGHT, taken[:1])
    pool.release(LEASED, taken[:2])


def test_two_leases_of_one_block_end_one_by_one(pool):
    taken = pool.allocate(1)
    pool.hold(LEASED, taken)
    pool.hold(LEASED, taken)
    pool.release(OWNED, taken, ORDINARY)
    pool.release(LEASED, taken)
    assert pool.counts().leased == 1
    pool.release(LEASED, taken)
    assert pool.counts().free == 6


def test_leasing_a_cached_block_protects_it_from_eviction(pool):
    pool.release(OWNED, allocate_full(pool, "a", 2), ORDINARY)
    hit = pool.match(hashes("a", 2))
    pool.hold(LEASED, hit)
    pool.allocate(4)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert pool.match(hashes("a", 2)) == hit


@pytest.mark.parametrize("kind", KINDS)
def test_releasing_a_block_that_is_not_held_is_a_bug(kind):
    with pytest.raises(AssertionError, match="released more often"):
        BlockPool(2).release(kind, [BlockId(0)])


def test_a_misplaced_block_is_noticed():
    pool = BlockPool(2)
    pool._holders[OWNED][0] = 1
    with pytest.raises(AssertionError):
        pool.validate()


def cached(pool, hashes, *, mark=ORDINARY, after=()):
    """Caches a prefix whose first blocks, `after`, are cached already."""
    blocks = list(pool.match(after))
    pool.hold(OWNED, blocks)
    blocks += pool.allocate(len(hashes) - len(blocks))
    pool.set_hashes(blocks, hashes)
    pool.release(OWNED, blocks, mark)
    pool.validate()


def test_spare_blocks_are_evicted_before_older_ones():
    pool = BlockPool(4)
    cached(pool, [b"old", b"old2"])
    cached(pool, [b"new", b"new2"], mark=EVICT_FIRST)
    pool.allocate(2)
    assert len(pool.match([b"old", b"old2"])) == 2
    assert not pool.match([b"new"])


def test_a_prefix_that_a_kept_block_follows_is_not_spare():
    pool = BlockPool(4)
    cached(pool, [b"system", b"theirs"])
    cached(pool, [b"system", b"ours"], mark=EVICT_FIRST, after=[b"system"])
    pool.allocate(2)  # allocates a free block and the block marked as evict first
    assert len(pool.match([b"system", b"theirs"])) == 2
    pool.validate()


def test_a_prompt_that_only_an_answer_follows_may_be_spare():
    pool = BlockPool(4)
    cached(pool, [b"old", b"old2"])
    blocks = pool.allocate(2)
    pool.set_hashes([blocks[0]], [b"prompt"])
    pool.set_hashes([blocks[1]], [b"answer"], parent=b"prompt", is_answer=True)
    pool.release(OWNED, blocks, ORDINARY)
    pool.hold(LEASED, blocks[:1])
    pool.release(LEASED, blocks[:1], EVICT_FIRST)
    pool.validate()
    pool.allocate(1)
    assert not pool.match([b"prompt"])
    assert len(pool.match([b"old", b"old2"])) == 2
    pool.validate()


def test_a_spare_prefix_that_is_used_again_is_kept():
    pool = BlockPool(4)
    cached(pool, [b"a", b"b"], mark=EVICT_FIRST)
    cached(pool, [b"c", b"d"])
    cached(pool, [b"a", b"b"], after=[b"a", b"b"])
    pool.allocate(2)
    assert len(pool.match([b"a", b"b"])) == 2


def test_what_a_reader_keeps_is_spare_once_its_lease_ended():
    pool = BlockPool(4)
    cached(pool, [b"a", b"b"])
    cached(pool, [b"c", b"d"])
    blocks = pool.match([b"c", b"d"])
    pool.hold(LEASED, blocks)
    pool.release(LEASED, blocks, EVICT_FIRST)
    pool.allocate(2)
    assert len(pool.match([b"a", b"b"])) == 2
    assert not pool.match([b"c"])


def test_recurring_blocks_stay_longer_than_others_but_not_for_ever():
    pool = BlockPool(8)
    cached(pool, [b"a", b"a2"], mark=LIKELY_REUSED)
    for name in (b"b", b"c", b"d"):
        cached(pool, [name, name + b"2"])
    for number in range(4):  # blocks of b, c and d were idle for 4 allocations and then evicted
        cached(pool, [b"e%d" % number, b"f%d" % number])
        assert len(pool.match([b"a", b"a2"])) == 2
    assert not pool.match([b"b"])
    cached(pool, [b"g", b"h"])
    # the block was idle for 14 allocations, more than three times as long
    assert not pool.match([b"a"])
    pool.validate()
