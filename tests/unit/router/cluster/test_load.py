"""The share of recent time spent on prompts, and the share saved by caches."""

import pytest

from router.cluster.learning import MEMORY_S, PromptLoad


def test_steady_prompts_take_their_share():
    load = PromptLoad()
    for number in range(600):
        load.record(0.03, number * 0.1, num_computed=30, num_cached=0)
    assert load.share(1, 60.0) == pytest.approx(0.3, rel=0.05)
    assert load.share(2, 60.0) == load.share(1, 60.0) / 2


def test_old_prompts_are_forgotten():
    load = PromptLoad()
    assert load.share(1, 5.0) == 0.0
    load.record(10.0, 5.0, num_computed=1000, num_cached=0)
    assert load.share(1, 5.0) == 10.0 / MEMORY_S
    assert load.share(1, 5.0 + 10 * MEMORY_S) < 1e-3


def test_a_cached_token_saves_its_time_as_often_as_it_is_found():
    load = PromptLoad()
    assert load.cached_token_s == 0.0
    load.record(1.0, 0.0, num_computed=750, num_cached=250)
    assert load.cached_token_s == pytest.approx(0.25 / 750)
    for _ in range(400):
        load.record(1.0, 0.0, num_computed=1000, num_cached=0)
    assert load.cached_token_s == pytest.approx(0.0, abs=1e-6)


def test_prompts_that_are_cached_as_a_whole_tell_nothing():
    load = PromptLoad()
    load.record(0.0, 0.0, num_computed=0, num_cached=100)
    assert load.cached_token_s == 0.0
