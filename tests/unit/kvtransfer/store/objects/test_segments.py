"""The index finds the same blocks as a simple model, and deletes the oldest segments first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.store.objects.manifest import SEGMENT_BLOCKS, ManifestBlock
from kvtransfer.store.objects.segments import (
    ObjectBlock,
    ObjectEntry,
    SegmentIndex,
    choose_blocks,
)

BLOCK_BYTES = 10
MAX_BYTES = 100


def digest(i):
    return bytes([i]) * 16


def blocks_of(*numbers):
    return [
        ManifestBlock(digest(number), None, i * BLOCK_BYTES, BLOCK_BYTES, number)
        for i, number in enumerate(numbers)
    ]


def block(number, payload=bytes(BLOCK_BYTES)):
    return ObjectBlock(digest(number), None, payload)


def filled(*segments):
    """Returns an index with segments of these blocks, the oldest first."""
    index = SegmentIndex(MAX_BYTES)
    for i, numbers in enumerate(segments):
        index.add(str(i), BLOCK_BYTES * len(numbers), float(i))
        index.fill(str(i), blocks_of(*numbers))
    return index


@given(st.sets(st.integers(0, 19)))
def test_each_wanted_block_is_read_once_in_the_fewest_ranges(wanted):
    index = filled(range(10), range(10, 20))
    reads = index.plan_reads([digest(i) for i in (*wanted, *wanted, 99)])
    read = [block.checksum for one in reads for block in one.blocks]
    assert sorted(read) == sorted(wanted)
    for one in reads:
        assert one.end - one.start == BLOCK_BYTES * len(one.blocks)
    ends = {i for i in wanted if i + 1 not in wanted or i == 9}
    assert len(reads) == len(ends)


def test_a_duplicate_is_read_from_the_other_segment_when_one_goes():
    index = filled([1, 2], [2, 3])
    assert [one.name for one in index.plan_reads([digest(2)])] == ["1"]
    index.hide(["1"])
    assert [one.name for one in index.plan_reads([digest(2)])] == ["0"]
    assert digest(3) not in index


def test_a_damaged_block_is_read_from_its_duplicate():
    index = filled([1, 2], [2, 3])
    index.remove_block("1", digest(2))
    assert [one.name for one in index.plan_reads([digest(2)])] == ["0"]
    index.remove_block("0", digest(2))
    assert index.plan_reads([digest(2)]) == []
    assert digest(1) in index


def test_bytes_count_until_the_segment_is_removed():
    index = filled([1, 2], [3])
    index.hide(["0"])
    assert index.num_bytes == 30
    index.remove(["0", "0", "unknown"])
    assert index.num_bytes == 10


def test_a_segment_that_is_being_deleted_is_not_filled_again():
    index = filled([1])
    index.add("late", 10, 9.0)
    index.hide(["late"])
    index.fill("late", blocks_of(7))
    assert digest(7) not in index


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, MAX_BYTES))
def test_victims_are_the_oldest_and_no_more_than_needed(sizes, incoming):
    index = SegmentIndex(MAX_BYTES)
    for i, size in enumerate(sizes):
        index.add(str(i), size * BLOCK_BYTES, float(i))
    victims = index.choose_victims(incoming)
    assert victims == [str(i) for i in range(len(victims))]
    left = sum(sizes[len(victims) :]) * BLOCK_BYTES
    assert left + incoming <= MAX_BYTES
    if victims:
        assert left + sizes[len(victims) - 1] * BLOCK_BYTES + incoming > MAX_BYTES


def test_there_is_never_room_for_more_than_the_bound():
    assert filled([1]).choose_victims(MAX_BYTES + 1) is None


def test_only_unknown_blocks_are_written_and_each_once():
    chosen = choose_blocks([block(1), block(2), block(3), block(2)], BLOCK_BYTES, filled([1]))
    assert [one.block_hash for one in chosen] == [digest(2), digest(3)]


@pytest.mark.parametrize(
    "blocks", [[block(i) for i in range(SEGMENT_BLOCKS + 1)], [block(1, bytes(BLOCK_BYTES - 1))]]
)
def test_too_many_blocks_and_other_sizes_are_refused(blocks):
    with pytest.raises(ValueError, match="block"):
        choose_blocks(blocks, BLOCK_BYTES, ())


class IndexMachine(RuleBasedStateMachine):
    """Compares the index with a simple table of segments."""

    names = st.sampled_from("abcd")
    numbers = st.sets(st.integers(0, 5), min_size=1)

    def __init__(self):
        super().__init__()
        self.index = SegmentIndex(MAX_BYTES)
        self.model = {}  # name to [bytes, hashes or None, whether it may still be filled]

    @rule(name=names, num_bytes=st.integers(0, 40))
    def add(self, name, num_bytes):
        if name not in self.model:
            self.index.add(name, num_bytes, 0.0)
            self.model[name] = [num_bytes, set(), True]

    @rule(name=names, numbers=numbers)
    def fill(self, name, numbers):
        self.index.fill(name, blocks_of(*numbers))
        if name in self.model and self.model[name][2]:
            self.model[name][1:] = [{digest(i) for i in numbers}, False]

    @rule(name=names)
    def mark_bad(self, name):
        if name in self.model and self.model[name][2]:
            self.index.mark_bad(name)
            self.model[name][2] = False

    @rule(name=names)
    def hide(self, name):
        self.index.hide([name])
        if name in self.model:
            self.model[name][1:] = [set(), False]

    @rule(name=names)
    def remove(self, name):
        self.index.remove([name])
        self.model.pop(name, None)

    @rule(name=names, number=st.integers(0, 5))
    def remove_one(self, name, number):
        self.index.remove_block(name, digest(number))
        if name in self.model:
            self.model[name][1].discard(digest(number))

    @rule(name=names, num_bytes=st.integers(0, 40))
    def correct_size(self, name, num_bytes):
        if name in self.model:
            self.index.correct_size(name, num_bytes)
            self.model[name][0] = num_bytes

    @invariant()
    def the_index_agrees_with_the_model(self):
        self.index.validate()
        assert self.index.num_bytes == sum(one[0] for one in self.model.values())
        known = set().union(*(one[1] for one in self.model.values()))
        assert {entry.block_hash for entry in self.index.entries()} == known
        assert all(isinstance(entry, ObjectEntry) for entry in self.index.entries())
        planned = self.index.plan_reads(sorted(known))
        assert {one.block_hash for read in planned for one in read.blocks} == known


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=25)
