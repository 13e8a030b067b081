"""Predicted answer lengths."""

import random

from router.cluster.learning import ENOUGH, AnswerLengths


def test_until_enough_have_ended_an_answer_becomes_as_long_as_it_may():
    lengths = AnswerLengths()
    for _ in range(ENOUGH - 1):
        lengths.observe(1000, 10)
    assert (lengths.nearly_longest(1000), lengths.mean(1000)) == (1000, 1000.0)
    lengths.observe(1000, 10)
    assert (lengths.nearly_longest(1000), lengths.mean(1000)) == (10, 10.0)


def test_nearly_no_answer_is_longer_than_predicted():
    rng = random.Random(0)
    lengths = AnswerLengths()
    drawn = [min(int(rng.expovariate(0.01)) + 1, 2000) for _ in range(512)]
    for num_tokens in drawn:
        lengths.observe(2000, num_tokens)
    recent = drawn[-256:]
    longer = sum(n > lengths.nearly_longest(2000) for n in recent)
    assert longer <= 0.06 * len(recent)
    assert 0.8 < lengths.mean(2000) * len(recent) / sum(recent) < 1.2


def test_only_answers_with_a_like_bound_count():
    lengths = AnswerLengths()
    for _ in range(ENOUGH):
        lengths.observe(100, 90)
    assert lengths.nearly_longest(70) == 70  # at most the allowed length
    assert lengths.nearly_longest(110) == 90
    assert lengths.nearly_longest(4000) == 4000


def test_old_lengths_are_forgotten():
    lengths = AnswerLengths()
    for _ in range(300):
        lengths.observe(1000, 900)
    for _ in range(300):
        lengths.observe(1000, 30)
    assert (lengths.nearly_longest(1000), lengths.mean(1000)) == (30, 30.0)


def test_rest_of_an_answer_is_predicted_from_longer_ones():
    lengths = AnswerLengths()
    for _ in range(ENOUGH):
        lengths.observe(100, 10)
        lengths.observe(100, 50)
    assert lengths.left(100, 0) == 30.0
    assert lengths.left(100, 10) == 40.0
    assert lengths.left(100, 49) == 1.0
    assert lengths.left(100, 60) == 40.0  # no answer was that long: the whole limit is expected
    assert lengths.left(100, 100) == 1.0


def test_how_likely_an_answer_is_to_go_on_depends_on_how_long_it_is():
    lengths = AnswerLengths()
    assert lengths.survival(100, 0, 99.0) == 1.0
    for _ in range(ENOUGH):
        lengths.observe(100, 10)
        lengths.observe(100, 50)
    assert lengths.survival(100, 0, 9.5) == 1.0
    assert lengths.survival(100, 0, 10.0) == 0.5
    assert lengths.survival(100, 10, 10.0) == 1.0
    assert lengths.survival(100, 10, 40.0) == 0.0
    assert lengths.survival(100, 60, 10.0) == 1.0
    assert lengths.survival(100, 60, 40.0) == 0.0
