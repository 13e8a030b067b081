"""Guides by token ids: allowed tokens, and forbidden token sequences."""

import random

import numpy as np
import pytest

from engine.errors import GrammarError
from engine.grammar.tokens import NOTHING_LEFT, TokenGuide, TokenRules, rules_of
from engine.messages import Grammar, GrammarKind

VOCAB_SIZE = 70


def allowed_ids(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_only_allowed_ids_may_come():
    guide = TokenGuide(TokenRules(allowed=(3, 64, 69)), VOCAB_SIZE)
    assert allowed_ids(guide.masks([])[0]) == {3, 64, 69}
    assert guide.num_allowed([3, 69, 4, 3]) == 2


def test_a_banned_id_never_comes():
    guide = TokenGuide(TokenRules(banned=((5,), (69,))), VOCAB_SIZE)
    assert allowed_ids(guide.masks([])[0]) == set(range(VOCAB_SIZE)) - {5, 69}


def test_the_last_id_of_a_banned_sequence_does_not_follow_the_others():
    guide = TokenGuide(TokenRules(banned=((1, 2, 3), (2, 4))), VOCAB_SIZE)
    guide.replay([9, 1])
    every = set(range(VOCAB_SIZE))
    first, second, third = map(allowed_ids, guide.masks([2, 7]))
    assert (first, second, third) == (every, every - {3, 4}, every)
    assert guide.num_allowed([2, 3]) == 1
    guide.consume(2)
    assert guide.num_allowed([4]) == 0
    assert guide.num_allowed([5, 3]) == 2


@pytest.mark.parametrize("seed", range(20))
def test_masks_equal_the_definition(seed):
    rng = random.Random(seed)
    banned = tuple(
        tuple(rng.choices(range(4), k=rng.randint(2, 3))) for _ in range(rng.randint(1, 4))
    )
    rules = TokenRules(allowed=(0, 1, 2, 3, 4), banned=banned)
    guide, answer = TokenGuide(rules, VOCAB_SIZE), []
    for _ in range(40):
        may = {i for i in rules.allowed if not any(_ends([*answer, i], s) for s in banned)}
        assert allowed_ids(guide.masks([])[0]) == may
        again = TokenGuide(rules_of(rules.grammar()), VOCAB_SIZE)
        again.replay(answer)
        assert (again.masks([]) == guide.masks([])).all()
        token = rng.choice(sorted(may))
        assert guide.num_allowed([token]) == 1
        guide.consume(token)
        answer.append(token)


def _ends(answer: list[int], sequence: tuple[int, ...]) -> bool:
    return tuple(answer[-len(sequence) :]) == sequence


def test_an_answer_that_cannot_go_on_is_a_fault():
    guide = TokenGuide(TokenRules(allowed=(1,), banned=((1, 1),)), VOCAB_SIZE)
    guide.consume(1)
    assert not guide.masks([]).any()
    assert guide.fault == NOTHING_LEFT


@pytest.mark.parametrize(
    "source", ["", "[]x", "[[70],[]]", "[[-1],[]]", "[null,[[]]]", "[null,[[99]]]", "[[1],[[1]]]"]
)
def test_bad_rules_are_refused(source):
    with pytest.raises(GrammarError):
        TokenGuide(rules_of(Grammar(GrammarKind.TOKENS, source)), VOCAB_SIZE)
