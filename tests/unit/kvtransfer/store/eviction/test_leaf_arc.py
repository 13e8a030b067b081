"""`LeafArc` on sequences whose order is known from the paper."""

from kvtransfer.store.eviction.leaf_arc import LeafArc
from tests.unit.kvtransfer.store.eviction.test_policies import block


def anything(_):
    return True


def filled(*numbers: int) -> LeafArc:
    policy = LeafArc(3)
    for number in numbers:
        policy.add(block(number), None, 0.0)
    return policy


def test_blocks_used_once_go_before_those_used_twice():
    policy = filled(1, 2, 3)
    policy.use([block(1)], 1.0)
    assert policy.choose(3, anything) == [block(2), block(3), block(1)]


def test_a_block_that_returns_soon_gives_blocks_used_once_more_room():
    policy = filled(1, 2, 3)
    policy.use([block(2)], 1.0)
    assert policy.choose(1, anything) == [block(1)]
    policy.add(block(1), None, 2.0)  # its share grows to one block, and block 1 was used twice
    assert policy.choose(1, anything) == [block(2)]  # of those used twice, since 3 is within it
    assert policy.choose(2, anything) == [block(1), block(3)]


def test_a_return_of_an_often_used_block_takes_room_from_blocks_used_once():
    policy = filled(1, 2, 3)
    policy.use([block(2)], 1.0)
    policy.choose(1, anything)
    policy.add(block(1), None, 2.0)
    assert policy.choose(1, anything) == [block(2)]
    policy.add(block(2), None, 3.0)  # the share of blocks used once is nothing again
    assert policy.choose(1, anything) == [block(3)]


def test_a_removed_block_leaves_no_ghost():
    policy = filled(1, 2)
    policy.remove(block(1))
    policy.add(block(1), None, 1.0)
    assert policy.choose(2, anything) == [block(2), block(1)]
