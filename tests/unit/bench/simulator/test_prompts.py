"""Prompts of a trace: hashes are made from ids, and are equal for router and workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.prompts import SimulatedPrompts, Unwritten, base_of
from bench.simulator.traces import Trace, TraceRequest
from engine.messages import OfferPrefix, RequestId, Sampling, SeqId
from engine.worker.blocks import hash_block, hash_blocks
from engine.worker.intake import MAX_ID

FIRST, SECOND = TraceRequest(0.0, 10, 4, (1, 2, 3)), TraceRequest(0.0, 12, 4, (1, 2, 9))
TRACE = Trace("t", 4, (FIRST, SECOND))
SAMPLING = Sampling(seed=5)


def read(prompts, seq_id, token_ids):
    return prompts.read(OfferPrefix(SeqId(seq_id), list(token_ids)), 4)


def test_hashes_are_equal_exactly_for_equal_ids():
    prompts = SimulatedPrompts(TRACE, 4)
    tokens = {
        name: prompts.open(RequestId(name), r, SAMPLING)[0]
        for name, r in (("a", FIRST), ("b", SECOND))
    }
    first = read(prompts, "a.0", tokens["a"]).block_hashes
    second = read(prompts, "b.3", tokens["b"]).block_hashes
    assert (len(tokens["a"]), len(first)) == (10, 2)
    assert list(second[:2]) == list(first)
    assert second[2] not in first


def test_router_and_workers_share_hashes_of_prompt_and_answer():
    prompts = SimulatedPrompts(TRACE, 4)
    tokens, hashes = prompts.open(RequestId("a"), FIRST, SAMPLING)
    journal = [*tokens, 70, 71, 72]
    facts = read(prompts, "a.1", journal)
    assert hashes is not None
    assert hashes.leading(journal, num_tokens=13, block_size=4) == list(facts.block_hashes)
    assert facts.block_hashes[2] == hash_block(facts.block_hashes[1], journal[8:12])
    assert facts.largest_id == MAX_ID


def test_ended_request_is_forgotten():
    prompts = SimulatedPrompts(TRACE, 4)
    tokens, _ = prompts.open(RequestId("a"), FIRST, SAMPLING)
    prompts.close(RequestId("a"))
    assert read(prompts, "a.0", tokens).block_hashes == hash_blocks(tokens, 4)


# ---------------------------------------------------------------- prompts without stored tokens


@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(1, 4), max_size=4), st.data())
def test_unwritten_prompt_acts_like_a_list(prompt_len, base, grown, data):
    unwritten, written = Unwritten(7, prompt_len, base), [7] * prompt_len
    for number in grown:
        following = range(base + len(written), base + len(written) + number)
        assert list(unwritten + following) == written + list(following)
        unwritten += following
        written += following
    unwritten.append(base + len(written))
    written.append(base + len(written))
    assert list(unwritten) == written
    assert [unwritten[i] for i in range(-len(written), len(written))] == written + written
    ends = st.none() | st.integers(-20, 20)
    part = slice(data.draw(ends), data.draw(ends))
    assert list(unwritten[part]) == written[part]
    assert len(unwritten[part]) == len(written[part])


def test_unwritten_prompt_grows_only_by_the_next_tokens():
    unwritten = Unwritten(7, 3, base_of(SAMPLING))
    with pytest.raises(AssertionError):
        unwritten.append(7)
    with pytest.raises(AssertionError):
        unwritten += [base_of(SAMPLING) + 4]


def test_copy_grows_independently():
    unwritten = Unwritten(7, 3, 0)
    unwritten.copy().append(3)
    assert len(unwritten) == 3
