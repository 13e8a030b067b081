"""Classic policies on sequences whose order is known, and bounds that hold for all of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.eviction.classics import CLASSICS
from engine.worker.blocks import BlockHash

LETTERS = "abcdefghijklm"


def played(name: str, num_blocks: int, accesses: str) -> set[str]:
    """Letters that are cached after these accesses."""
    cache = CLASSICS[name](num_blocks)
    for letter in accesses:
        cache.access(BlockHash(letter.encode()))
    return {letter for letter in LETTERS if letter.encode() in cache}


def test_lru_keeps_the_blocks_used_last():
    assert played("lru", 3, "abcad") == set("cad")


def test_arc_keeps_what_was_used_twice_through_a_scan():
    assert played("arc", 3, "aabcdefg") == set("afg")


def test_s3_fifo_moves_what_was_used_thrice_past_a_scan():
    assert "a" in played("s3_fifo", 10, "aaabcdefghijk")
    assert "a" not in played("s3_fifo", 10, "abcdefghijk")


def test_w_tinylfu_refuses_blocks_that_are_rarer_than_those_it_holds():
    assert played("w_tinylfu", 3, "aabbcdef") == set("abf")


def test_gdsf_keeps_frequent_blocks_until_the_floor_has_risen():
    assert played("gdsf", 2, "aaabc") == set("ac")
    assert "a" not in played("gdsf", 2, "aaabcdefghijklm")


@pytest.mark.parametrize("name", CLASSICS)
@given(accesses=st.text(LETTERS, max_size=80), num_blocks=st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_no_policy_holds_more_blocks_than_it_has_room_for(name, accesses, num_blocks):
    assert len(played(name, num_blocks, accesses)) <= num_blocks
