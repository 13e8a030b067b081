"""What a gateway knows of prefixes elsewhere, block by block."""

import pytest

from engine.blocks import hash_blocks
from engine.messages import WorkerId
from router.prefixes import PrefixHashes, PrefixMap

A, B = WorkerId("a"), WorkerId("b")


def hashes(tokens):
    return hash_blocks(list(tokens), 4)


@pytest.fixture
def known():
    prefixes = PrefixMap()
    prefixes.add(A, 6)
    prefixes.add(B, 6)
    yield prefixes
    prefixes.validate()


# ---------------------------------------------------------------- what is where


def test_of_each_worker_the_leading_blocks_it_holds_are_known(known):
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
    assert known.longest(hashes(range(16))) == {A: 2}  # its end went first


def test_what_is_used_again_is_kept(known):
    known.record(A, hashes(range(16)))
    known.record(A, hashes(range(100, 108)))
    known.record(A, hashes(range(16)))
    known.record(A, hashes(range(200, 208)))
    assert known.longest(hashes(range(16))) == {A: 4}
    assert known.longest(hashes(range(100, 108))) == {}


def test_a_worker_that_comes_back_holds_nothing(known):
    known.record(A, hashes(range(8)))
    known.forget(A)
    assert known.workers == {B}
    known.record(A, hashes(range(8)))
    known.add(A, 6)
    assert known.longest(hashes(range(8))) == {}


def test_what_a_worker_turns_out_not_to_hold_is_taken_back(known):
    three = hashes(range(12))
    known.record(A, three)
    known.retract(A, three[1:])
    known.retract(WorkerId("stranger"), three)
    assert known.longest(three) == {A: 1}


def test_hashes_are_those_of_the_workers_and_computed_once(monkeypatch):
    prefix, tokens = PrefixHashes(), list(range(30))
    assert prefix.leading(tokens[:10], num_tokens=10, block_size=4) == hashes(range(8))
    calls = []
    monkeypatch.setattr(
        "router.prefixes.hash_block", lambda parent, ids: calls.append(tuple(ids)) or b"new"
    )
    assert prefix.leading(tokens, num_tokens=7, block_size=4) == hashes(range(4))
    assert calls == []
    assert prefix.leading(tokens, num_tokens=12, block_size=4) == [*hashes(range(8)), b"new"]
    assert calls == [(8, 9, 10, 11)]


def test_workers_with_other_blocks_have_other_hashes():
    prefix = PrefixHashes()
    prefix.leading(range(8), num_tokens=8, block_size=4)
    assert prefix.leading(range(8), num_tokens=8, block_size=2) == hash_blocks(range(8), 2)
