"""Prompts that continue a conversation, and conversations that are likely reused."""

import pytest

from router.cluster import learning
from router.cluster.learning import ENOUGH_PROMPTS, Conversations


def prompt(name, *, num_blocks=10):
    """Returns the hashes of a conversation's blocks."""
    return [f"{name}.{number}".encode() for number in range(num_blocks)]


def talk(known, names, num_turns):
    """Records conversations of `num_turns` turns each.

    Returns what was found out for each prompt.
    """
    return [
        known.record(prompt(name, num_blocks=10 + turn))
        for name in names
        for turn in range(num_turns)
    ]


def test_prompts_recur_once_they_are_known_to_be_followed_more_than_others():
    known = Conversations()
    talk(known, (f"short {number}" for number in range(100)), 1)
    said = talk(known, (f"long {number}" for number in range(ENOUGH_PROMPTS)), 4)
    assert not any(said[:ENOUGH_PROMPTS])
    assert said[-4:] == [False, True, True, True]


def test_prompts_that_are_followed_no_more_than_others_do_not_recur():
    known = Conversations()
    assert not any(talk(known, map(str, range(200)), 2))


@pytest.mark.parametrize(("num_new", "recurs"), [(1, True), (4, True), (5, False), (30, False)])
def test_prompt_that_adds_much_does_not_recur(num_new, recurs):
    known = Conversations()
    talk(known, (f"short {number}" for number in range(100)), 1)
    talk(known, (f"long {number}" for number in range(ENOUGH_PROMPTS)), 4)
    known.record(prompt("new"))
    assert known.record(prompt("new", num_blocks=10 + num_new)) == recurs


def test_prompt_without_a_full_block_says_nothing():
    known = Conversations()
    assert not known.record([])
    assert not known.record([])


def test_the_latest_prompts_are_remembered(monkeypatch):
    monkeypatch.setattr(learning, "MAX_PROMPTS", 3)
    known = Conversations()
    for name in "abcd":
        known.record(prompt(name))
    assert list(known._ends) == [prompt(name)[-1] for name in "bcd"]
    assert sum(known._num) <= 3
