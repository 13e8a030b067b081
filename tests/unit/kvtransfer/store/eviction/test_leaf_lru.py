"""`LeafLru` with sequences of known order, and compared with a slow twin."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.store.eviction.leaf_lru import LeafLru
from tests.unit.kvtransfer.store.eviction.test_policies import block, chain_of, parent_of


def anything(_):
    return True


def filled(*numbers: int) -> LeafLru:
    policy = LeafLru()
    for number in numbers:
        policy.add(block(number), parent_of(number), 0.0)
    return policy


def test_the_oldest_leaf_goes_first_and_then_its_parent_by_its_own_age():
    policy = filled(1, 2, 3, 4)  # tree of blocks: 1 -> (2 -> 4, 3)
    assert policy.choose(4, anything) == [block(3), block(4), block(2), block(1)]


def test_a_chain_that_was_read_goes_after_one_that_was_not():
    policy = filled(1, 2, 3)
    policy.use(chain_of(2), 1.0)
    assert policy.choose(3, anything) == [block(3), block(2), block(1)]


def test_held_leaves_are_passed_over_and_come_back():
    policy = filled(1, 2, 3)
    assert policy.choose(1, lambda each: each != block(2)) == [block(3)]
    assert policy.choose(1, anything) == [block(2)]


def test_a_block_before_a_held_one_goes_if_nothing_else_may():
    policy = filled(1, 2, 4)
    assert policy.choose(3, lambda each: each != block(4)) == [block(2), block(1)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "use", "remove", "choose"]), st.integers(1, 30)),
        max_size=60,
    )
)
@settings(max_examples=80, deadline=None)
def test_it_is_the_least_recently_used_leaf_of_a_slow_twin(steps):
    policy = LeafLru()
    last_use: dict[int, int] = {}
    ticks = 0
    for step, number in steps:
        if step == "add":
            ticks += 1
            policy.add(block(number), parent_of(number), 0.0)
            last_use.setdefault(number, ticks)
        elif step == "use":
            policy.use(chain_of(number), 0.0)
            while number:
                ticks += 1
                if number in last_use:
                    last_use[number] = ticks
                number //= 2
        elif step == "remove":
            policy.remove(block(number))
            last_use.pop(number, None)
        else:
            leaves = {n for n in last_use if not {2 * n, 2 * n + 1} & last_use.keys()}
            oldest = min(leaves, key=last_use.__getitem__, default=None)
            assert policy.choose(1, anything) == ([] if oldest is None else [block(oldest)])
            last_use.pop(oldest, None)
