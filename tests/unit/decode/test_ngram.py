"""Proposals from the tokens that followed the same tokens before."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.native.ngrams import NativeNgrams, best_ngrams
from decode.ngram import (
    BUDGET_TOKENS,
    LONGER,
    OWN_TOKENS,
    SIZES,
    Match,
    NgramIndex,
    PythonNgrams,
    follow,
)

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def index_of(token_ids, at_once=1000) -> NgramIndex:
    index = NgramIndex(token_ids)
    while index.index(at_once):
        pass
    return index


def slow_find(token_ids) -> Match | None:
    """The reference: looks at every place."""
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


@given(TOKENS, st.integers(1, 9))
def test_a_match_is_that_of_a_search_through_all_tokens(token_ids, at_once):
    assert index_of(token_ids, at_once).find() == slow_find(token_ids)


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_an_index_follows_the_answer_as_it_grows(prompt, answer, at_once):
    token_ids = list(prompt)
    index = NgramIndex(token_ids)
    for token in answer:
        index.index(at_once)
        token_ids.append(token)
    while index.index(at_once):
        pass
    assert index.find() == slow_find(token_ids)
    assert index.num_missing == 0


@given(TOKENS, st.integers(1, 20))
def test_what_follows_a_match_is_what_a_slow_copy_would_write(token_ids, num_tokens):
    index = index_of(token_ids)
    match = index.find()
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
        ([0, 0, 0], Match(2, 2)),  # token 0 is not taken for no token
        ([5, 6, 7, 5, 6], Match(2, 2)),
        ([1, 5, 6, 2, 5, 6, 3, 5, 6], Match(6, 2)),  # the most recent
        ([1, 5, 6, 2, 5, 6, 1, 5, 6], Match(3, 3)),  # a longer one before a more recent
        ([9, 1, 5, 6, 2, 9, 1, 5, 6], Match(4, 4)),
        ([*range(8), 50, *range(8)], Match(8, 8)),
        ([*range(20), 50, *range(20)], Match(20, 16)),
        ([2**32 - 1, 2**32 - 2, 4, 2**32 - 1, 2**32 - 2], Match(2, 2)),
    ],
)
def test_the_longest_run_wins_and_of_equals_the_most_recent(token_ids, match):
    assert index_of(token_ids).find() == match


def test_a_long_prompt_is_indexed_over_several_steps():
    token_ids = list(range(100))
    index = NgramIndex(token_ids)
    assert [index.index(40) for _ in range(4)] == [40, 40, 19, 0]
    token_ids += [0, 1]
    assert index.num_missing == 2
    assert index.index(40) == 2
    assert index.find() == Match(2, 2)


def test_tokens_that_are_not_indexed_are_not_found():
    token_ids = [*range(100), 0, 1, 90, 91]
    index = NgramIndex(token_ids)
    index.index(50)
    assert index.find() is None
    index.index(50)
    assert index.find() == Match(92, 2)


NEW = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=3, max_size=3)


@given(st.lists(TOKENS, min_size=3, max_size=3), st.lists(NEW, max_size=12))
def test_cpp_finds_what_python_finds(prompts, steps):
    native = best_ngrams()
    if not isinstance(native, NativeNgrams):
        pytest.skip("no C++ compiler")
    sequences, slow = [list(prompt) for prompt in prompts], PythonNgrams()
    in_cpp = [native.open(sequence) for sequence in sequences]
    in_python = [slow.open(sequence) for sequence in sequences]
    for new in steps:
        assert native.look(in_cpp) == slow.look(in_python)
        for sequence, tokens in zip(sequences, new, strict=True):
            sequence += tokens


def test_cpp_finds_what_python_finds_in_long_sequences():
    native = best_ngrams()
    if not isinstance(native, NativeNgrams):
        pytest.skip("no C++ compiler")
    rng = random.Random(0)
    token_ids = [rng.randrange(60) for _ in range(5000)]
    slow = PythonNgrams(budget_tokens=10_000)
    in_cpp, in_python = native.open(token_ids), slow.open(token_ids)
    for _ in range(400):
        assert native.look([in_cpp]) == slow.look([in_python])
        token_ids += [rng.randrange(60) for _ in range(20)]


def test_answers_are_indexed_even_if_others_have_long_prompts():
    ngrams = PythonNgrams()
    prompt, answer = list(range(2 * BUDGET_TOKENS)), list(range(OWN_TOKENS))
    indexes = [ngrams.open(prompt), ngrams.open(answer)]
    answer += [3, 4]
    ngrams.look(indexes)
    assert [index.num_missing for index in indexes] == [BUDGET_TOKENS - 1, 1]
    assert ngrams.look(indexes) == [None, Match(5, 2)]
