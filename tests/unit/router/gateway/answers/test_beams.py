"""A beam search equals the reference that does all steps, and requests no more than it needs."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Logprobs
from router.gateway.answers.searching import BeamRules, BeamSearch
from tests.kits.router.beams import reference_beams

VOCAB = 9
PROMPT = (3, 1)


def model_of(seed: int, end_bias: float):
    """Returns a model whose distribution depends only on the tokens so far and the seed."""

    def after(token_ids):
        rng = random.Random(repr((seed, list(token_ids))))
        logits = [rng.gauss(0.0, 2.0) for _ in range(VOCAB)]
        logits[0] += end_bias
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return after


def scores(after, rules: BeamRules) -> Logprobs:
    ids = sorted(range(VOCAB), key=lambda i: -after[i])[: rules.num_extensions]
    return Logprobs(0.0, 1, tuple(ids), tuple(after[i] for i in ids))


def searched(model, rules: BeamRules) -> tuple[BeamSearch, int]:
    """Returns a finished search and the number of its steps."""
    search, num_steps = BeamSearch(rules), 0
    while not search.is_over:
        search.step([scores(model([*PROMPT, *each.token_ids]), rules) for each in search.open])
        num_steps += 1
    return search, num_steps


@given(
    seed=st.integers(0, 10**6),
    end_bias=st.sampled_from([-4.0, 0.0, 3.0]),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 5),
    end_ids=st.sampled_from([(), (0,), (0, 5)]),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
)
def test_a_search_equals_one_that_does_all_steps(
    seed, end_bias, width, max_tokens, end_ids, length_penalty
):
    model = model_of(seed, end_bias)
    rules = BeamRules(width, frozenset(end_ids), len(PROMPT), max_tokens, length_penalty)
    search, _ = searched(model, rules)
    expected = reference_beams(
        model,
        PROMPT,
        width=width,
        max_tokens=max_tokens,
        end_ids=end_ids,
        length_penalty=length_penalty,
    )
    found = search.best(width)
    assert [list(each.token_ids) for each in found] == [tokens for tokens, _ in expected]
    assert [each.logprob for each in found] == pytest.approx([total for _, total in expected])
    for each in found:
        assert sum(s.logprob for s in each.scores) == pytest.approx(each.logprob)
        assert each.is_complete == (each.token_ids[-1] in end_ids)


def test_one_beam_is_the_greedy_answer():
    model = model_of(7, 0.0)
    search, _ = searched(model, BeamRules(1, frozenset(), len(PROMPT), 4))
    tokens = list(PROMPT)
    for _ in range(4):
        after = model(tokens)
        tokens.append(max(range(VOCAB), key=after.__getitem__))
    assert search.best(1)[0].token_ids == tuple(tokens[len(PROMPT) :])


def test_a_search_ends_early_when_nothing_can_become_better():
    model = model_of(1, 6.0)  # most answers are short
    _, num_steps = searched(model, BeamRules(2, frozenset([0]), len(PROMPT), 50, 0.0))
    assert num_steps < 10


def test_the_rank_of_a_token_is_its_place_among_the_likeliest():
    search, _ = searched(model_of(2, 0.0), BeamRules(3, frozenset(), len(PROMPT), 2))
    for hypothesis in search.best(3):
        for token_id, score in zip(hypothesis.token_ids, hypothesis.scores, strict=True):
            assert score.top_ids[score.rank - 1] == token_id
