"""The index of all workers' blocks, which has the methods of the slow twin PrefixMap."""

import random

import pytest

from engine.messages import WorkerId
from engine.worker.blocks import BlockHash, hash_blocks
from router.native.index import PrefixIndex, TooManyWorkers, pack
from tests.kits.twins.prefix_map import PrefixMap

A, B = WorkerId("a"), WorkerId("b")


def hashes(tokens):
    return hash_blocks(list(tokens), 4)


@pytest.fixture(params=[PrefixMap, PrefixIndex])
def known(request):
    """The index or the PrefixMap; both have the same methods."""
    prefixes = request.param()
    prefixes.add(A, 6)
    prefixes.add(B, 6)
    yield prefixes
    prefixes.validate()


@pytest.fixture
def index():
    made = PrefixIndex(seed=3)
    made.add(A, 100)
    made.add(B, 100)
    yield made
    made.validate()


def chain(length, *, seed=0):
    rng = random.Random(seed)
    return [BlockHash(rng.randbytes(16)) for _ in range(length)]


# ---------------------------------------------------------------- behaviour of a PrefixMap


def test_each_workers_leading_blocks_are_known(known):
    known.record(A, hashes(range(12)))
    known.record(B, hashes([*range(4), 50, 51, 52, 53]))
    assert known.longest(hashes(range(20))) == {A: 3, B: 1}
    assert known.longest(hashes([*range(4), 50, 51, 52, 53])) == {A: 1, B: 2}
    assert known.longest(hashes(range(1, 9))) == {}
    assert known.longest([]) == {}


def test_a_block_behind_a_gap_does_not_count(known):
    first, second, third = hashes(range(12))
    known.record(A, [first, third])
    assert known.longest([first, second, third]) == {A: 1}


def test_a_worker_is_credited_with_as_much_as_it_can_hold_and_the_latest_of_that(known):
    known.record(A, hashes(range(16)))
    known.record(A, hashes(range(100, 116)))
    assert known.longest(hashes(range(100, 116))) == {A: 4}
    assert known.longest(hashes(range(16))) == {A: 2}  # its last blocks were evicted first


def test_reused_blocks_are_kept(known):
    known.record(A, hashes(range(16)))
    known.record(A, hashes(range(100, 108)))
    known.record(A, hashes(range(16)))
    known.record(A, hashes(range(200, 208)))
    assert known.longest(hashes(range(16))) == {A: 4}
    assert known.longest(hashes(range(100, 108))) == {}


def test_a_worker_that_comes_back_holds_nothing(known):
    known.record(A, hashes(range(8)))
    known.remove(A)
    assert known.workers == {B}
    known.record(A, hashes(range(8)))
    known.add(A, 6)
    assert known.longest(hashes(range(8))) == {}


def test_retracted_blocks_are_forgotten(known):
    three = hashes(range(12))
    known.record(A, three)
    known.retract(A, three[1:])
    assert known.longest(three) == {A: 1}


def test_events_of_unknown_workers_are_ignored(known):
    stranger = WorkerId("stranger")
    for tell in (known.record, known.retract, known.stored, known.removed):
        tell(stranger, hashes(range(8)))
    known.cleared(stranger)
    known.remove(stranger)
    assert known.longest(hashes(range(8))) == {}


def test_stored_removed_and_cleared_are_believed(known):
    three = hashes(range(12))
    known.stored(A, three[:1])
    known.stored(A, three[1:])
    known.stored(B, three)
    known.removed(B, three[2:])
    known.removed(B, three[2:])
    assert known.longest(three) == {A: 3, B: 2}
    known.cleared(A)
    assert known.longest(three) == {B: 2}


# ---------------------------------------------------------------- events and inferred blocks


def test_worker_with_block_events_gets_no_credit(index):
    seen, told = chain(4), chain(4, seed=1)
    index.record(A, seen)
    index.stored(A, told)
    assert index.longest(seen) == {}
    index.record(A, seen)
    assert index.longest(seen) == {}
    assert index.longest(told) == {A: 4}


def test_retraction_does_not_override_block_events(
    index,
):
    index.stored(A, chain(4))
    index.retract(A, chain(4))
    assert index.longest(chain(4)) == {A: 4}


def test_the_first_event_of_a_worker_may_be_a_removal(index):
    seen = chain(4)
    index.record(A, seen)
    index.removed(A, seen[3:])
    assert index.longest(seen) == {}


def test_worker_without_events_is_credited_again(index):
    index.stored(A, chain(4))
    index.cleared(A)
    index.record(A, chain(2))
    assert index.longest(chain(4)) == {A: 2}


# ---------------------------------------------------------------- many blocks


def test_each_of_thousands_of_owners_is_found_with_its_depth():
    index = PrefixIndex()
    blocks = chain(12)
    depths = {WorkerId(f"w{i}"): min(i % 13, 12) for i in range(2000)}
    for name, depth in depths.items():
        index.add(name, 100)
        index.stored(name, blocks[:depth])
    assert index.longest(blocks) == {name: depth for name, depth in depths.items() if depth}
    for name in list(depths)[5:]:
        index.removed(name, blocks)
    assert index.longest(blocks) == {name: depths[name] for name in list(depths)[1:5]}
    index.validate()


def test_memory_is_given_back_and_small(index):
    before = index.num_bytes
    blocks = chain(100_000)
    for name in (A, B):
        index.stored(name, blocks)
    assert index.num_blocks == len(blocks)
    assert index.num_bytes / index.num_blocks < 60  # including the empty hash table
    for name in (A, B):
        index.removed(name, blocks)
    assert index.num_blocks == 0
    assert index.num_bytes < before + 4096 * 8 * 16 + 1  # the minimum that each shard keeps


def test_hashes_must_be_hashes(index):
    with pytest.raises(ValueError, match="16 bytes"):
        index.stored(A, [BlockHash(b"short")])
    assert pack([]) == b""


def test_more_workers_than_can_be_told_apart_are_refused():
    index = PrefixIndex()
    for number in range(0xFFFF):
        index.add(WorkerId(f"w{number}"), 1)
    with pytest.raises(TooManyWorkers):
        index.add(A, 1)
