"""Hashes of a prompt's blocks. `test_index` tests the holders of blocks for both indexes."""

import pytest

from engine.worker.blocks import hash_blocks
from router.machine.requests import PrefixHashes


@pytest.mark.parametrize("salt", [b"", b"s" * 32])
def test_hashes_equal_the_workers_and_are_computed_once(monkeypatch, salt):
    prefix, tokens = PrefixHashes(salt=salt), list(range(30))
    expected = hash_blocks(tokens, 4, salt)
    assert prefix.leading(tokens[:10], num_tokens=10, block_size=4) == expected[:2]
    calls = []

    def noted(token_ids, block_size, salt, *, parent):
        calls.append(tuple(token_ids))
        return hash_blocks(token_ids, block_size, salt, parent=parent)

    monkeypatch.setattr("router.machine.requests.hash_blocks", noted)
    assert prefix.leading(tokens, num_tokens=7, block_size=4) == expected[:1]
    assert calls == []
    assert prefix.leading(tokens, num_tokens=16, block_size=4) == expected[:4]
    assert calls == [(8, 9, 10, 11, 12, 13, 14, 15)]


def test_workers_with_other_blocks_have_other_hashes():
    prefix = PrefixHashes()
    prefix.leading(range(8), num_tokens=8, block_size=4)
    assert prefix.leading(range(8), num_tokens=8, block_size=2) == hash_blocks(range(8), 2)


def test_a_copy_goes_its_own_way():
    first = PrefixHashes(salt=b"s")
    first.leading(range(8), num_tokens=8, block_size=4)
    copy = first.copy()
    longer = [*range(8), 9, 9, 9, 9]
    assert copy.leading(longer, num_tokens=12, block_size=4) == hash_blocks(longer, 4, b"s")
    assert first.leading(range(12), num_tokens=12, block_size=4) == hash_blocks(range(12), 4, b"s")
