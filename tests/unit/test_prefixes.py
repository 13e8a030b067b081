"""Hashes of a prompt's blocks. Who holds which is asked of both indexes in `test_index`."""

from engine.blocks import hash_blocks
from router.prefixes import PrefixHashes


def hashes(tokens):
    return hash_blocks(list(tokens), 4)


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
