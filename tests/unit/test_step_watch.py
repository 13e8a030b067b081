"""A step that does not end is told of, and ends the worker in the end."""

import pytest

from deploy.step_watch import FIRST_STEPS_FACTOR, LONG_STEP_S, NUM_FIRST_STEPS, StepWatch
from engine.errors import StepStuck


def looks(watch: StepWatch, num: int, *, turns: bool, num_steps: int = 100) -> list[float]:
    """What is told in so many looks, one a second; the loop turns meanwhile, or does not."""
    told = []
    for _ in range(num):
        looks.now_s += 1.0
        looks.num_turns += turns
        told.append(watch.look(num_turns=looks.num_turns, num_steps=num_steps, now_s=looks.now_s))
    return told


@pytest.fixture(autouse=True)
def _time():
    looks.now_s, looks.num_turns = 0.0, 0


def test_only_steps_that_last_are_told_of():
    watch = StepWatch(60.0, 0.0)
    assert looks(watch, 5, turns=True) == [0.0] * 5
    assert looks(watch, 4, turns=False) == [0.0, 0.0, 3.0, 4.0]
    assert LONG_STEP_S == 2.0
    assert looks(watch, 2, turns=True) == [0.0, 0.0]


def test_a_step_that_does_not_end_is_stuck():
    watch = StepWatch(10.0, 0.0)
    looks(watch, 10, turns=False)
    with pytest.raises(StepStuck) as caught:
        looks(watch, 1, turns=False)
    assert caught.value.seconds == 11.0


def test_it_may_last_for_ever_where_that_is_wanted():
    assert looks(StepWatch(None, 0.0), 1000, turns=False)[-1] == 1000.0


def test_first_steps_may_compile():
    watch = StepWatch(10.0, 0.0)
    early = NUM_FIRST_STEPS - 1
    assert looks(watch, int(10 * FIRST_STEPS_FACTOR), turns=False, num_steps=early)[-1] == 0.0
    with pytest.raises(StepStuck):
        looks(watch, 1, turns=False, num_steps=early)


def test_a_process_that_was_stopped_as_a_whole_is_not_stuck():
    watch = StepWatch(10.0, 0.0)
    looks(watch, 1, turns=True)
    looks.now_s += 3600.0
    assert looks(watch, 2, turns=False) == [0.0, 0.0]
