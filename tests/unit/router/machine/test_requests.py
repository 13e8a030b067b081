"""Requests carry the hashes of their prompts' blocks; updates can be joined and split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import FinishReason, Logprobs
from engine.worker.blocks import hash_blocks
from router.machine.requests import Finished, PrefixHashes, Update, joined
from tests.kits.router.gateway import TIMELINE

SCORES = st.builds(Logprobs, st.floats(-9, 0), st.integers(1, 9))


@st.composite
def updates(draw):
    ids = tuple(draw(st.lists(st.integers(0, 9), max_size=20)))
    is_scored = draw(st.booleans())
    return Update(
        ids,
        outcome=draw(st.none() | st.just(Finished(FinishReason.STOP))),
        timeline=draw(st.none() | st.just(TIMELINE)),
        logprobs=tuple(draw(SCORES) for _ in ids) if is_scored else (),
        prompt_logprobs=tuple(draw(st.lists(SCORES, max_size=3))),
        embedding=draw(st.binary(max_size=4)),
    )


@given(updates(), st.integers(1, 8))
def test_the_parts_of_an_update_are_the_update(update, num_tokens):
    parts = list(update.parts(num_tokens))
    assert joined(parts) == update
    assert all(len(part.token_ids) <= num_tokens for part in parts)
    assert all(part.outcome is None for part in parts[:-1])


@given(st.lists(updates(), min_size=1, max_size=5))
def test_joined_updates_have_all_tokens_in_order_and_the_last_outcome(some):
    whole = joined(some)
    assert whole.token_ids == tuple(i for update in some for i in update.token_ids)
    assert whole.logprobs == tuple(each for update in some for each in update.logprobs)
    assert whole.outcome == some[-1].outcome


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
