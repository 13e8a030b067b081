"""Every policy with random histories: no block is lost, invented or evicted while in use."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.eviction.leaf_worth import LeafWorth
from kvtransfer.store.eviction.seam import Eviction

POLICIES: dict[str, Callable[[], Eviction]] = {
    "lru": LeafLru,
    "worth": lambda: LeafWorth(10),
}
FEW = settings(max_examples=60, deadline=None)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4))


# A small forest: block n follows block n // 2, and block 1 has no predecessor.
NUMBERS = st.integers(1, 40)
STEPS = st.one_of(
    st.tuples(st.just("add"), NUMBERS),
    st.tuples(st.just("use"), NUMBERS),
    st.tuples(st.just("remove"), NUMBERS),
    st.tuples(st.just("choose"), st.integers(0, 6)),
    st.tuples(st.just("hold"), NUMBERS),
    st.tuples(st.just("let go"), NUMBERS),
)


def parent_of(number: int) -> BlockHash | None:
    return block(number // 2) if number > 1 else None


def chain_of(number: int) -> list[BlockHash]:
    chain = []
    while number:
        chain.append(block(number))
        number //= 2
    return chain[::-1]


class History:
    """Plays steps on a policy, beside a set of the blocks that the policy must contain."""

    def __init__(self, policy: Eviction):
        self.policy = policy
        self.cached: set[BlockHash] = set()
        self.held: set[BlockHash] = set()
        self.chosen: list[BlockHash] = []
        self.now_s = 0.0

    def play(self, step: str, number: int) -> None:
        self.now_s += 1.0
        getattr(self, step.replace(" ", "_"))(number)
        self.policy.validate()
        assert len(self.policy) == len(self.cached)
        assert all(each in self.policy for each in self.cached)

    def add(self, number):
        self.policy.add(block(number), parent_of(number), self.now_s)
        self.cached.add(block(number))

    def use(self, number):
        self.policy.use(chain_of(number), self.now_s)

    def remove(self, number):
        self.policy.remove(block(number))
        self.cached.discard(block(number))

    def hold(self, number):
        self.held.add(block(number))

    def let_go(self, number):
        self.held.discard(block(number))

    def choose(self, num):
        free = self.cached - self.held
        chosen = self.policy.choose(num, lambda each: each not in self.held)
        assert len(chosen) == min(num, len(free))
        for each in chosen:
            assert each in self.cached
            assert each not in self.held
            if self.has_child(each):
                assert all(self.has_child(other) for other in self.cached - self.held)
            self.cached.remove(each)
        self.chosen += chosen

    def has_child(self, each: BlockHash) -> bool:
        number = int.from_bytes(each)
        return not self.cached.isdisjoint({block(2 * number), block(2 * number + 1)})


@pytest.mark.parametrize("name", POLICIES)
@given(steps=st.lists(STEPS, max_size=60))
@FEW
def test_victims_are_cached_blocks_that_may_go_and_leaves_come_first(name, steps):
    history = History(POLICIES[name]())
    for step in steps:
        history.play(*step)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=st.lists(STEPS, max_size=60))
@FEW
def test_one_history_always_gives_the_same_victims(name, steps):
    first, second = History(POLICIES[name]()), History(POLICIES[name]())
    for step in steps:
        first.play(*step)
        second.play(*step)
    assert first.chosen == second.chosen


@pytest.mark.parametrize("name", POLICIES)
def test_recovered_blocks_are_those_added_one_by_one(name):
    links = [(block(n), parent_of(n)) for n in range(1, 30)]
    together, single = POLICIES[name](), POLICIES[name]()
    together.add_all([*links, *links[:3]], 0.0)
    for each, parent in links:
        single.add(each, parent, 0.0)
    together.validate()
    assert together.choose(40, lambda _: True) == single.choose(40, lambda _: True)


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_that_claims_to_follow_itself_follows_none(name):
    policy = POLICIES[name]()
    policy.add(block(1), block(1), 0.0)
    policy.add_all([(block(2), block(2)), (block(3), None)], 0.0)
    policy.validate()
    assert sorted(policy.choose(9, lambda _: True)) == [block(1), block(2), block(3)]


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_that_claim_to_follow_each_other_can_still_leave(name):
    policy = POLICIES[name]()
    policy.add(block(1), block(2), 0.0)
    policy.add(block(2), block(1), 0.0)
    policy.validate()
    assert sorted(policy.choose(9, lambda _: True)) == [block(1), block(2)]
