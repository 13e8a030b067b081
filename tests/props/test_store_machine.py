"""A store under every order of events: sinks read what their lease promised, and no slot leaks.

Workers cache and evict blocks, die, and return. Pulls, loads and writes succeed or fail, in any
order. The disk turns off and on again, an operator drops all blocks, the process is killed at any
moment. Slots contain hashes, so that a wrong read is detected (`tests.kits.fakes.store`).
"""

import random
from collections import Counter

import pytest

from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.eviction.leaf_worth import LeafWorth
from kvtransfer.store.shelf import Shelf
from tests.kits.fakes.store import StoreRig
from tests.kits.seeds import seeds

POLICIES = {"lru": lambda num: LeafLru(), "worth": LeafWorth}
NUM_STEPS = 400


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", seeds(20))
def test_sinks_read_what_leases_promise_and_nothing_leaks(seed, policy):
    rng = random.Random(f"{policy}-{seed}")
    rig = StoreRig(rng, POLICIES[policy], num_slots=rng.choice((1, 4, 9)))
    for _ in range(NUM_STEPS):
        rig.step()
    rig.settle()


def test_the_runs_reach_all_that_matters():
    """The property test proves something only if its runs reach all of these events."""
    met: Counter[str] = Counter()
    for seed in range(60):
        rig = StoreRig(random.Random(seed), POLICIES["lru"], num_slots=3 + seed % 7)
        for _ in range(NUM_STEPS):
            rig.step()
        met.update(rig.counted + Counter(rig.machine.counters))
    wanted = (
        "prefix_offers:held",
        "prefix_offers:not_held",
        "offered_blocks:host",
        "offered_blocks:disk",
        "loaded_blocks:disk",
        "failed_loads:disk_damaged",
        "written_blocks:disk",
        "failed_writes:disk_EIO",
        "taken_blocks",
        "dropped_blocks:not_held",
        "dropped_blocks:pull_failed",
        "dropped_writes:disk_evicted_first",
        "evicted_blocks:host",
        "evicted_blocks:disk",
        "prefetched_blocks",
    )
    assert not [name for name in wanted if not met[name]]


def test_a_planted_mistake_is_caught(monkeypatch):
    """A shelf that hands out slots which sinks still read must fail the property test."""

    def settle(self, slot):
        if slot not in self._writing and slot not in self._blocks and slot not in self._free:
            self._free.append(slot)

    monkeypatch.setattr(Shelf, "_settle", settle)
    monkeypatch.setattr(Shelf, "_may_go", lambda self, block: True)
    monkeypatch.setattr(Shelf, "validate", lambda self: None)

    def run():
        for seed in range(5):
            rig = StoreRig(random.Random(seed), POLICIES["lru"], num_slots=4)
            for _ in range(NUM_STEPS):
                rig.step()

    with pytest.raises(AssertionError):
        run()
