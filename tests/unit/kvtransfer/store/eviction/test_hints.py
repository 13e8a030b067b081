"""Session hints: the blocks that they keep, and the limits for a key with false hints."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.leaf_worth import LeafWorth
from kvtransfer.store.eviction.seam import (
    BlocksPinned,
    BlocksUnpinned,
    SessionEnded,
    SessionUsed,
)
from kvtransfer.store.eviction.sessions import HintBudget, LiveSession, Sessions
from tests.unit.kvtransfer.store.eviction.test_policies import (
    NUMBERS,
    STEPS,
    History,
    block,
    chain_of,
)

ROOMY = HintBudget(kept_blocks=100, pinned_blocks=2, all_pinned_blocks=4)
LIAR = "liar"


def anything(_):
    return True


def name(text: str, number: int) -> BlockHash:
    return BlockHash(f"{text}{number}".encode())


def store(policy, text, num_blocks=3, now_s=0.0, system=()):
    """Stores a chain of blocks. Returns the chain with the system prompt's blocks before it."""
    chain = [*system, *(name(text, number) for number in range(num_blocks))]
    cached = [each for each in chain if each in policy]
    policy.use(cached, now_s)
    for parent, each in zip([None, *chain], chain, strict=False):
        policy.add(each, parent, now_s)
    return tuple(chain)


def test_blocks_of_an_ended_session_go_first():
    policy = LeafWorth(100, ROOMY)
    live, ended = store(policy, "live"), store(policy, "ended")
    policy.hint(SessionUsed("key", "one", live), 0.0)
    policy.hint(SessionUsed("key", "two", ended), 0.0)
    policy.hint(SessionEnded("key", "two"), 1.0)
    assert policy.choose(3, anything) == [*reversed(ended)]
    policy.validate()


def test_blocks_that_another_session_shares_stay_when_one_ends():
    policy = LeafWorth(100, ROOMY)
    system = store(policy, "system")
    one = store(policy, "one", system=system)
    policy.hint(SessionUsed("key", "one", one), 0.0)
    two = store(policy, "two", system=system)
    policy.hint(SessionUsed("key", "two", two), 0.0)
    policy.hint(SessionEnded("key", "one"), 1.0)
    assert set(policy.choose(3, anything)) == set(one) - set(system)


def test_what_a_next_turn_left_behind_goes_first():
    policy = LeafWorth(100, ROOMY)
    before = store(policy, "turn", 3)
    policy.hint(SessionUsed("key", "one", before), 0.0)
    other = store(policy, "other", 3)
    after = store(policy, "next", 2, 10.0, system=before[:2])
    policy.hint(SessionUsed("key", "one", after), 10.0)
    assert policy.choose(1, anything) == [before[2]]
    assert all(each in policy for each in (*after, *other))


def test_a_session_that_returns_soon_stays_longer_than_one_that_returns_late():
    policy = LeafWorth(100, ROOMY)
    late, soon = store(policy, "late"), store(policy, "soon")
    policy.hint(SessionUsed("key", "soon", soon, 10.0), 0.0)
    policy.hint(SessionUsed("key", "late", late, 3000.0), 0.0)
    assert policy.choose(3, anything) == [*reversed(late)]


def test_a_promise_that_ran_out_is_worth_less_than_one_that_holds():
    policy = LeafWorth(100, ROOMY)
    over, holds = store(policy, "over"), store(policy, "holds")
    policy.hint(SessionUsed("key", "over", over, 10.0), 0.0)
    policy.hint(SessionUsed("key", "holds", holds, 80.0), 0.0)
    policy.add(name("other", 0), None, 800.0)
    policy.remove(name("other", 0))
    assert policy.choose(3, anything) == [*reversed(over)]


def test_pinned_blocks_never_go_until_they_are_unpinned():
    policy = LeafWorth(100, ROOMY)
    chain = store(policy, "chain", 3)
    policy.hint(BlocksPinned("key", chain), 0.0)
    assert policy.choose(3, anything) == [chain[2]]  # the budget keeps two blocks
    assert policy.choose(3, anything) == []
    policy.hint(BlocksUnpinned("other", chain), 0.0)
    assert policy.choose(3, anything) == []
    policy.hint(BlocksUnpinned("key", chain), 0.0)
    assert policy.choose(3, anything) == [chain[1], chain[0]]
    policy.validate()


def test_a_pin_of_two_keys_holds_until_both_let_go():
    policy = LeafWorth(100, ROOMY)
    [only] = store(policy, "only", 1)
    for key in ("one", "two"):
        policy.hint(BlocksPinned(key, (only,)), 0.0)
    policy.hint(BlocksUnpinned("one", (only,)), 0.0)
    assert policy.choose(1, anything) == []


def test_what_exceeds_a_keys_budget_is_treated_as_if_no_hint_had_come():
    policy = LeafWorth(100, HintBudget(kept_blocks=3, pinned_blocks=0, all_pinned_blocks=0))
    within, beyond = store(policy, "within"), store(policy, "beyond")
    policy.hint(SessionUsed("key", "within", within, 10.0), 0.0)
    policy.hint(SessionUsed("key", "beyond", beyond, 10.0), 0.0)
    policy.hint(SessionEnded("key", "beyond"), 1.0)
    policy.hint(SessionEnded("key", "within"), 2.0)
    policy.validate()
    assert policy.choose(3, anything) == [*reversed(within)]


def test_all_keys_together_can_pin_only_a_part_of_the_tier():
    policy = LeafWorth(100, ROOMY)
    chains = [store(policy, f"chain{n}-", 2) for n in range(4)]
    for number, chain in enumerate(chains):
        policy.hint(BlocksPinned(f"key{number}", chain), 0.0)
    policy.validate()
    assert set(policy.choose(8, anything)) == {*chains[2], *chains[3]}


@pytest.mark.parametrize("keep_s", [-1.0, 0.0, math.nan, math.inf, 1e300, 1e-300])
def test_senseless_promises_do_no_harm(keep_s):
    policy = LeafWorth(100, ROOMY)
    chain = store(policy, "chain")
    policy.hint(SessionUsed("key", "one", chain, keep_s), 0.0)
    policy.hint(SessionUsed("key", "one", (*chain, *chain), keep_s), 5.0)
    policy.validate()
    assert policy.choose(9, anything) == [*reversed(chain)]


def test_hints_about_blocks_and_sessions_that_are_unknown_change_nothing():
    policy = LeafWorth(100, ROOMY)
    chain = store(policy, "chain")
    policy.hint(SessionEnded("key", "none"), 0.0)
    policy.hint(BlocksUnpinned("key", chain), 0.0)
    policy.hint(SessionUsed("key", "one", (name("absent", 1),)), 0.0)
    policy.validate()
    assert len(policy) == 3


def test_sessions_and_keys_are_bounded():
    budget = HintBudget(50, 1, 9, num_sessions=3, num_keys=2)
    policy = LeafWorth(1000, budget)
    for number in range(20):
        chain = store(policy, f"chain{number}-")
        for key in ("one", "two", "three"):
            policy.hint(SessionUsed(key, f"{key}{number}", chain, 10.0), float(number))
            policy.hint(BlocksPinned(key, chain), float(number))
        policy.validate()


def test_a_key_without_sessions_makes_room_for_another_key():
    budget = HintBudget(50, 1, 9, num_keys=1)
    policy = LeafWorth(100, budget)
    ended, live = store(policy, "ended"), store(policy, "live")
    policy.hint(SessionUsed("one", "s", ended), 0.0)
    policy.hint(SessionEnded("one", "s"), 0.0)
    policy.choose(3, anything)
    policy.hint(SessionUsed("two", "s", live, 10.0), 0.0)
    policy.validate()
    assert policy.choose(1, anything) == [live[2]]


@pytest.mark.parametrize("keep_s", [1.0, 60.0, 1e9, None])
def test_a_liar_takes_no_more_than_its_share_of_the_room(keep_s):
    """An honest key fills the tier and returns.

    A key with false hints stores more and never returns.
    """
    size = 400
    policy = LeafWorth(size, HintBudget.of_tier(size))
    honest = [store(policy, f"honest{n}-", 10) for n in range(20)]
    for turn in range(12):
        now_s = 60.0 * turn
        for number, chain in enumerate(honest):
            store(policy, f"honest{number}-", 10, now_s)
            policy.hint(SessionUsed("honest", str(number), chain, 60.0), now_s)
        for number in range(100):
            chain = store(policy, f"liar{turn}-{number}-", 5, now_s + 30.0)
            policy.hint(SessionUsed(LIAR, f"{turn}-{number}", chain, keep_s), now_s + 30.0)
            policy.choose(max(len(policy) - size, 0), anything)
        policy.validate()
        kept = sum(each in policy for chain in honest for each in chain)
        if turn > 3:
            assert kept >= 0.9 * 200


def test_a_key_whose_promises_fail_is_not_believed_until_it_keeps_some():
    sessions = Sessions(ROOMY)
    record = sessions.record(LIAR)

    def play_turns(num_turns, now_s, pause_s):
        for _ in range(num_turns):
            sessions.begin_turn(record, "s", LiveSession(LIAR, (), 10.0, now_s))
            now_s += pause_s

    play_turns(8, 0.0, 100.0)
    assert record.is_believed
    play_turns(3, 1e4, 100.0)
    assert not record.is_believed
    play_turns(5, 1e5, 10.0)
    assert record.is_believed


HINTED = st.one_of(
    STEPS,
    st.tuples(st.sampled_from(["use session", "end", "pin", "unpin"]), NUMBERS),
)


class HintedHistory(History):
    """Also plays hints of two API keys with three sessions each."""

    def __init__(self):
        budget = HintBudget(5, 2, 3, num_sessions=2, num_keys=2)
        super().__init__(LeafWorth(10, budget))

    def use_session(self, number):
        keep_s = None if number % 4 == 0 else float(number)
        hint = SessionUsed(f"key{number % 3}", str(number % 5), tuple(chain_of(number)), keep_s)
        self.policy.hint(hint, self.now_s)

    def end(self, number):
        self.policy.hint(SessionEnded(f"key{number % 3}", str(number % 5)), self.now_s)

    def pin(self, number):
        self.policy.hint(BlocksPinned(f"key{number % 3}", (block(number),)), self.now_s)

    def unpin(self, number):
        self.policy.hint(BlocksUnpinned(f"key{number % 3}", (block(number),)), self.now_s)

    def choose(self, num):
        chosen = self.policy.choose(num, lambda each: each not in self.held)
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= self.cached - self.held
        self.cached -= set(chosen)
        self.chosen += chosen


@given(steps=st.lists(HINTED, max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_hint_loses_a_block_or_breaks_a_bound(steps):
    first, second = HintedHistory(), HintedHistory()
    for step in steps:
        first.play(*step)
        second.play(*step)
    assert first.chosen == second.chosen
    first.held.clear()
    first.choose(100)
    assert len(first.cached) <= 3  # all cached blocks are pinned
