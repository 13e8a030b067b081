"""Log-probabilities equal log_softmax. Ranks and likeliest tokens equal the result of a sort."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Logprobs
from engine.model.sampling import choosing as module
from engine.model.sampling.choosing import logprobs_of

pytestmark = pytest.mark.torch

INF = math.inf


def plain_logprobs(logits, token_id, num_top):
    """Computes log-probability, rank and likeliest tokens of one row in plain Python."""
    best = max(logits)
    log_total = best + math.log(math.fsum(math.exp(x - best) for x in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num_top]
    return Logprobs(
        logits[token_id] - log_total,
        1 + sum(x > logits[token_id] for x in logits),
        tuple(order),
        tuple(logits[i] - log_total for i in order),
    )


def check(logits, token_ids, num_tops):
    found = logprobs_of(logits, token_ids, num_tops)
    rows = zip(found, logits.tolist(), token_ids, num_tops, strict=True)
    for logprobs, row, token_id, num_top in rows:
        expected = plain_logprobs(row, token_id, num_top)
        assert logprobs.rank == expected.rank
        assert logprobs.top_ids == expected.top_ids
        values = [expected.logprob, *expected.top_logprobs]
        assert [logprobs.logprob, *logprobs.top_logprobs] == pytest.approx(values, abs=2e-5)
    return found


VOCAB = 12
grid = st.integers(-6, 6).map(lambda i: i / 2) | st.sampled_from([0.0, -0.0, 1e-45, -1e-45, -INF])
rows = st.tuples(
    # The first logit is finite, so that softmax is defined.
    st.tuples(
        st.integers(-3, 3).map(float), st.lists(grid, min_size=VOCAB - 1, max_size=VOCAB - 1)
    ),
    st.integers(0, VOCAB - 1),
    st.integers(0, VOCAB + 2),
)


@given(st.lists(rows, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_rows_with_ties_equal_a_plain_sort(batch):
    logits = torch.tensor([[first, *others] for (first, others), _, _ in batch])
    check(logits, [row[1] for row in batch], [row[2] for row in batch])


@pytest.mark.parametrize("has_ties", [False, True])
def test_a_large_vocabulary_gives_the_same_result(has_ties):
    logits = torch.randn(3, 32_003, generator=torch.Generator().manual_seed(0)) * 4
    if has_ties:
        logits = logits.mul(8).round().div(8)
    check(logits, [0, 32_002, 77], [20, 0, 3])


def test_rows_without_ties_do_not_pay_for_them(monkeypatch):
    monkeypatch.setattr(module, "_best_ids_of_tied", None)
    check(torch.randn(5, 200, generator=torch.Generator().manual_seed(1)), [3] * 5, [7] * 5)


def test_the_likeliest_token_has_rank_one_and_ties_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ranks = [logprobs_of(logits, [token_id], [0])[0].rank for token_id in range(4)]
    assert ranks == [4, 1, 1, 3]
    assert logprobs_of(logits, [0], [3])[0].top_ids == (1, 2, 3)


def test_a_row_has_the_same_bits_in_any_batch_and_tile(monkeypatch):
    logits = torch.randn(70, 5003, generator=torch.Generator().manual_seed(4)) * 3
    token_ids = [71 * i for i in range(70)]
    num_tops = [i % 4 for i in range(70)]
    together = logprobs_of(logits, token_ids, num_tops)
    arguments = list(zip(logits.split(1), token_ids, num_tops, strict=True))
    assert [logprobs_of(row, [i], [k])[0] for row, i, k in arguments] == together
    heights = []
    in_tiles = module._logprobs
    monkeypatch.setattr(module, "LOGPROBS_TILE", 3 * 5003 + 7)
    monkeypatch.setattr(
        module, "_logprobs", lambda tile, *rest: heights.append(len(tile)) or in_tiles(tile, *rest)
    )
    assert logprobs_of(logits, token_ids, num_tops) == together
    assert heights == [3] * 23 + [1]


def test_a_tile_is_never_less_than_a_row(monkeypatch):
    monkeypatch.setattr(module, "LOGPROBS_TILE", 1)
    check(torch.randn(3, 9), [1, 2, 3], [2, 2, 2])


def test_logits_of_bf16_are_taken_in_fp32():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert check(logits, [1] * 4, [5] * 4) == logprobs_of(logits.float(), [1] * 4, [5] * 4)


def test_impossible_tokens_have_minus_infinity():
    (found,) = check(torch.tensor([[0.0, -INF, 0.0]]), [1], [3])
    assert found.logprob == -INF
    assert found.rank == 3
    assert found.top_logprobs[2] == -INF


def test_an_empty_batch_is_accepted():
    assert logprobs_of(torch.empty(0, 9), [], []) == []
