"""Drafts copied from the tokens that followed the same n-gram earlier."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.ngram import LONGER, SIZES, Match, Ngrams, follow

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def find(token_ids) -> Match | None:
    ngrams = Ngrams()
    return ngrams.find([ngrams.open(token_ids)])[0]


def slow_find(token_ids) -> Match | None:
    """Reference implementation that compares every position."""
    end = len(token_ids)
    for size in (*LONGER, *SIZES):
        last = token_ids[-size:]
        starts = [i for i in range(size, end) if token_ids[i - size : i] == last]
        if not starts or len(last) < size:
            continue
        if size in SIZES:
            return Match(starts[-1], size)
        most_recent = slow_find_of(token_ids, SIZES[0])
        if most_recent in starts:
            return Match(most_recent, size)
    return None


def slow_find_of(token_ids, size) -> int:
    last = token_ids[-size:]
    return max(i for i in range(size, len(token_ids)) if token_ids[i - size : i] == last)


@given(TOKENS, st.integers(1, 20))
def test_what_follows_a_match_is_what_a_slow_copy_would_write(token_ids, num_tokens):
    match = find(token_ids)
    if match is None:
        return
    slow = list(token_ids)
    for i in range(num_tokens):
        slow.append(slow[match.start + i])
    assert follow(token_ids, match, num_tokens) == slow[len(token_ids) :]


@pytest.mark.parametrize(
    ("token_ids", "match"),
    [
        ([7], None),
        ([7, 7], None),
        ([0, 0, 0], Match(2, 2)),  # token id 0 is a real token, not a missing one
        ([5, 6, 7, 5, 6], Match(2, 2)),
        ([1, 5, 6, 2, 5, 6, 3, 5, 6], Match(6, 2)),  # the most recent match is used
        ([1, 5, 6, 2, 5, 6, 1, 5, 6], Match(3, 3)),  # a longer match precedes a more recent one
        ([9, 1, 5, 6, 2, 9, 1, 5, 6], Match(4, 4)),
        ([*range(8), 50, *range(8)], Match(8, 8)),
        ([*range(20), 50, *range(20)], Match(20, 16)),
    ],
)
def test_the_longest_run_wins_and_of_equals_the_most_recent(token_ids, match):
    assert find(token_ids) == match


NEW = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=3, max_size=3)


@given(st.lists(TOKENS, min_size=3, max_size=3), st.lists(NEW, max_size=12))
def test_the_matches_of_growing_sequences_are_those_of_a_search_through_all_tokens(prompts, steps):
    ngrams, sequences = Ngrams(), [list(prompt) for prompt in prompts]
    opened = [ngrams.open(sequence) for sequence in sequences]
    for new in steps:
        assert ngrams.find(opened) == [slow_find(sequence) for sequence in sequences]
        for sequence, tokens in zip(sequences, new, strict=True):
            sequence += tokens


def test_matches_in_a_long_sequence_are_found():
    rng, ngrams = random.Random(0), Ngrams()
    token_ids = [rng.randrange(60) for _ in range(5000)]
    opened = ngrams.open(token_ids)
    for _ in range(20):
        assert ngrams.find([opened]) == [slow_find(token_ids)]
        token_ids += [rng.randrange(60) for _ in range(20)]
