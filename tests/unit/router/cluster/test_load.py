"""The share of time that prompts lately took."""

import pytest

from router.cluster.load import MEMORY_S, PromptLoad


def test_steady_prompts_take_their_share():
    load = PromptLoad()
    for number in range(600):
        load.note(0.03, number * 0.1)
    assert load.share(1, 60.0) == pytest.approx(0.3, rel=0.05)
    assert load.share(2, 60.0) == load.share(1, 60.0) / 2


def test_old_prompts_are_forgotten():
    load = PromptLoad()
    assert load.share(1, 5.0) == 0.0
    load.note(10.0, 5.0)
    assert load.share(1, 5.0) == 10.0 / MEMORY_S
    assert load.share(1, 5.0 + 10 * MEMORY_S) < 1e-3
