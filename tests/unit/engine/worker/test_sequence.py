"""The progress of one request: its tokens, blocks and hashes, and when it is complete."""

from types import SimpleNamespace

import pytest

from engine.messages import FinishReason, GatewayId, Limits, Sampling, SeqId
from engine.worker.blocks import BlockCounts, BlockPool, hash_blocks
from engine.worker.sequence import Sequence

BLOCK_SIZE = 4


def sequence(tokens, *, salt=b"", **limits) -> Sequence:
    return Sequence(
        seq_id=SeqId("a"),
        gateway_id=GatewayId("g"),
        token_ids=list(tokens),
        sampling=Sampling(),
        limits=Limits(**{"max_len": 100, **limits}),
        block_size=BLOCK_SIZE,
        salt=salt,
    )


@pytest.fixture
def pool():
    pool = BlockPool(8)
    yield pool
    pool.validate()


def test_the_full_blocks_of_a_prompt_are_hashed_from_the_start():
    assert sequence(range(11)).block_hashes == hash_blocks(range(8), BLOCK_SIZE)
    assert sequence(range(11), salt=b"s").block_hashes == hash_blocks(range(8), BLOCK_SIZE, b"s")


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_sequence_needs_blocks_for_all_its_tokens(num_tokens, num_blocks):
    assert sequence(range(num_tokens)).num_prompt_blocks == num_blocks


def test_a_block_is_found_by_others_as_soon_as_it_is_full(pool):
    seq = sequence(range(11))
    seq.block_table = pool.allocate(3)
    seq.advance(3, pool)
    assert pool.match(seq.block_hashes) == []
    seq.advance(3, pool)
    assert pool.match(seq.block_hashes) == seq.block_table[:1]
    seq.advance(5, pool)
    assert pool.match(seq.block_hashes) == seq.block_table[:2]
    assert (seq.num_computed_tokens, seq.num_hashed_blocks) == (11, 2)


def test_blocks_of_the_answer_are_hashed_as_they_fill(pool):
    seq = sequence(range(3))
    seq.block_table = pool.allocate(2)
    seq.advance(3, pool)
    for token in (50, 51, 52, 53, 54):
        seq.extend([token])
        seq.advance(1, pool)
    tokens = [*range(3), 50, 51, 52, 53, 54]
    assert pool.match(hash_blocks(tokens, BLOCK_SIZE)) == seq.block_table
    assert seq.block_hashes == hash_blocks(tokens, BLOCK_SIZE)


def test_the_salt_covers_blocks_of_the_answer_too(pool):
    seq = sequence(range(3), salt=b"s")
    seq.block_table = pool.allocate(1)
    seq.extend([50])
    seq.advance(4, pool)
    assert seq.block_hashes == hash_blocks([0, 1, 2, 50], BLOCK_SIZE, b"s")


def test_more_cannot_be_computed_than_there_are_tokens(pool):
    seq = sequence(range(3))
    seq.block_table = pool.allocate(1)
    with pytest.raises(AssertionError):
        seq.advance(4, pool)


def test_adopted_blocks_count_as_computed(pool):
    first = sequence(range(8))
    first.block_table = pool.allocate(2)
    first.advance(8, pool)

    seq = sequence(range(11))
    seq.adopt_cached(pool.match(seq.block_hashes), pool)
    assert seq.block_table == first.block_table
    assert (seq.num_computed_tokens, seq.num_cached_tokens, seq.num_hashed_blocks) == (8, 8, 2)
    first.release(pool)
    assert pool.counts() == BlockCounts(free=6, cached=0, owned=2, leased=0, in_flight=0)


def test_a_sequence_goes_on_behind_adopted_blocks(pool):
    first = sequence(range(4))
    first.block_table = pool.allocate(1)
    first.advance(4, pool)

    seq = sequence(range(8))
    seq.adopt_cached(pool.match(seq.block_hashes), pool)
    seq.block_table += pool.allocate(1)
    seq.advance(4, pool)
    assert pool.match(hash_blocks(range(8), BLOCK_SIZE)) == [0, 1]


def test_only_a_sequence_without_blocks_can_adopt(pool):
    seq = sequence(range(5))
    seq.block_table = pool.allocate(2)
    with pytest.raises(AssertionError):
        seq.adopt_cached([], pool)


def test_a_release_frees_every_block_and_keeps_hashed_ones_cached(pool):
    seq = sequence(range(6))
    seq.block_table = pool.allocate(2)
    seq.advance(6, pool)
    table = seq.block_table
    seq.release(pool)
    assert (seq.block_table, seq.num_computed_tokens, seq.num_hashed_blocks) == ([], 0, 0)
    assert len(table) == 2  # a row that refers to the table keeps the block
    assert pool.counts() == BlockCounts(free=7, cached=1, owned=0, leased=0, in_flight=0)


# ---------------------------------------------------------------- ends of sequences

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("length", "last_token", "finish"),
    [
        (5, 9, None),  # neither the maximum length nor a stop token
        (5, 7, STOP),
        (5, 8, STOP),
        (4, 7, None),  # a stop token below the minimum length is ignored
        (10, 9, LENGTH),
        (11, 9, LENGTH),  # longer than allowed, like after a failover
        (10, 7, STOP),  # a stop token at the maximum length counts as a stop
    ],
)
def test_a_sequence_ends_at_a_stop_or_at_its_greatest_length(length, last_token, finish):
    limits = Limits(max_len=10, min_len=4, stop_token_ids=(7, 8))
    assert limits.finish_reason(length, last_token) == finish


def test_a_least_length_beyond_the_greatest_does_not_matter():
    limits = Limits(max_len=5, min_len=9, stop_token_ids=(7,))
    assert limits.finish_reason(5, 7) is LENGTH


@pytest.mark.parametrize(("num_tokens", "banned"), [(3, (7, 8)), (4, ()), (5, ())])
def test_stops_are_banned_below_the_least_length(num_tokens, banned):
    seq = sequence(range(num_tokens), min_len=4, stop_token_ids=(7, 8))
    assert seq.banned() == banned
    assert (seq.extend([7])[1] is STOP) == (banned == ())


def test_without_stops_nothing_is_banned():
    assert sequence(range(3), min_len=10).banned() == ()


def test_append_returns_the_finish_reason():
    seq = sequence(range(3), max_len=5)
    assert [seq.extend([9])[1], seq.extend([9])[1]] == [None, LENGTH]
    assert seq.token_ids == [0, 1, 2, 9, 9]


# ---------------------------------------------------------------- drafts, penalties, grammars


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_len": 5}, 1),
        ({"max_len": 4}, 0),
        ({"max_len": 3}, 0),
        ({"min_len": 4, "stop_token_ids": (7,)}, 0),
        ({"min_len": 6, "stop_token_ids": (7,)}, 2),
        ({"min_len": 3, "stop_token_ids": (7,)}, 96),
        ({"min_len": 6}, 96),
    ],
)
def test_a_draft_ends_before_the_answer_and_before_stops_are_allowed(limits, most):
    assert sequence(range(3), **limits).max_drafted() == most


def test_a_block_is_full_for_others_when_the_draft_model_has_it_too(pool):
    seq = sequence(range(9))
    seq.block_table = pool.allocate(3)
    seq.advance(8, pool, num_draft_tokens=3)
    assert (pool.match(seq.block_hashes), seq.num_unseen_tokens) == ([], 5)
    seq.advance(1, pool, num_draft_tokens=8)
    assert pool.match(seq.block_hashes) == seq.block_table[:2]
    assert seq.num_unseen_tokens == 1


@pytest.mark.parametrize("num_draft_tokens", [3, 10])
def test_the_draft_model_forgets_nothing_and_is_never_ahead(pool, num_draft_tokens):
    seq = sequence(range(9))
    seq.block_table = pool.allocate(3)
    seq.advance(8, pool, num_draft_tokens=5)
    with pytest.raises(AssertionError):
        seq.advance(1, pool, num_draft_tokens=num_draft_tokens)


def test_adopted_and_released_blocks_have_both_models_or_neither(pool):
    first = sequence(range(8))
    first.block_table = pool.allocate(2)
    first.advance(8, pool)
    seq = sequence(range(11))
    seq.adopt_cached(pool.match(seq.block_hashes), pool)
    assert seq.num_unseen_tokens == 0
    seq.release(pool)
    assert (seq.num_draft_tokens, seq.num_unseen_tokens) == (0, 0)


def test_blocks_behind_the_tokens_are_given_back(pool):
    seq = sequence(range(6))
    seq.block_table = pool.allocate(4)
    seq.trim(pool)
    assert len(seq.block_table) == 2
    seq.trim(pool)
    assert pool.counts().owned == 2


def test_only_penalties_need_a_history():
    plain, penalised = sequence(range(3)), sequence(range(3))
    penalised.sampling = Sampling(frequency_penalty=0.5)
    penalised.__post_init__()
    penalised.extend([9])
    assert plain.history is None
    assert list(penalised.history) == [0, 1, 2, 9]


def test_a_grammar_follows_the_answer_up_to_its_last_token():
    consumed = []
    seq = sequence(range(3), max_len=6, stop_token_ids=(7,))
    seq.guide = SimpleNamespace(consume=consumed.append)
    assert [seq.extend([token])[1] for token in (4, 5, 7)] == [None, None, FinishReason.STOP]
    assert consumed == [4, 5]


@pytest.mark.parametrize("limits", [{}, {"stop_token_ids": (7,)}, {"max_len": 6}, {"max_len": 4}])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_tokens_added_together_end_as_they_would_one_by_one(limits, penalty):
    together, single = sequence(range(4), **limits), sequence(range(4), **limits)
    for seq in (together, single):
        seq.sampling = Sampling(presence_penalty=penalty)
        seq.__post_init__()
    finish, taken = None, []
    for token in (5, 6, 7, 8):
        taken.append(token)
        _, finish = single.extend([token])
        if finish is not None:
            break
    assert together.extend((5, 6, 7, 8)) == (taken, finish)
    assert (together.token_ids, together.history) == (single.token_ids, single.history)


def test_extending_by_no_tokens_ends_nothing():
    assert sequence(range(4)).extend(()) == ([], None)


def test_given_hashes_are_not_computed_again():
    known = [b"a" * 16, b"b" * 16]
    seq = Sequence(
        seq_id=SeqId("a"),
        gateway_id=GatewayId("g"),
        token_ids=list(range(9)),
        sampling=Sampling(),
        limits=Limits(max_len=20),
        block_size=BLOCK_SIZE,
        block_hashes=known,
    )
    assert seq.block_hashes == known
