"""A long step is reported, and a step that never finishes stops the worker."""

import pytest

from engine.errors import StepStuck
from engine.messages import StillStepping
from engine.worker.batch import BatchPlan, Row
from engine.worker.steps import FIRST_STEPS_FACTOR, LONG_STEP_S, NUM_FIRST_STEPS, StepWatch


def plan(*rows: tuple[int, int]) -> BatchPlan:
    """Returns a plan of rows with these numbers of tokens and draft tokens."""
    return BatchPlan(
        [
            Row(f"s{i}", [1] * num, 0, [], None, draft=[2] * num_drafted)
            for i, (num, num_drafted) in enumerate(rows)
        ]
    )


DECODE, VERIFY, CHUNK = plan((1, 0)), plan((1, 3)), plan((40, 0))
MIXED = plan((1, 0), (1, 0), (40, 0))


class Worker:
    """A step loop that is checked once a second."""

    def __init__(self, timeout_s: float | None) -> None:
        self.watch = StepWatch(timeout_s, 0.0)
        self.now_s = 0.0

    def warm_up(self, *plans: BatchPlan) -> None:
        for each in plans * NUM_FIRST_STEPS:
            self.begin(each)

    def begin(self, step: BatchPlan) -> None:
        self.watch.tick()
        self.watch.start(step)

    def check(self) -> StillStepping | None:
        self.now_s += 1.0
        return self.watch.check(self.now_s)

    def hang(self, seconds: int) -> list[StillStepping | None]:
        """Lets a step run for some seconds; returns the result of each second's check."""
        return [self.check() for _ in range(seconds)]


def test_only_long_steps_are_reported():
    worker = Worker(60.0)
    worker.warm_up(DECODE)
    for _ in range(5):
        worker.begin(DECODE)
        assert worker.check() is None
    assert worker.hang(4) == [None, None, StillStepping(3.0), StillStepping(4.0)]
    assert LONG_STEP_S == 2.0
    worker.begin(DECODE)
    assert worker.check() is None


def test_endless_step_is_stuck():
    worker = Worker(10.0)
    worker.warm_up(DECODE)
    worker.check()
    worker.begin(DECODE)
    worker.check()
    worker.hang(10)
    with pytest.raises(StepStuck) as caught:
        worker.check()
    assert caught.value.seconds == 11.0


def test_without_a_timeout_no_step_is_stuck():
    assert Worker(None).hang(1000)[-1] == StillStepping(1000.0, is_early=True)


def test_first_steps_get_more_time_and_are_reported_as_early():
    worker = Worker(10.0)
    worker.begin(DECODE)
    worker.check()
    told = worker.hang(int(10 * FIRST_STEPS_FACTOR))
    assert told[2:] == [StillStepping(s, is_early=True) for s in range(3, len(told) + 1)]
    with pytest.raises(StepStuck):
        worker.check()


@pytest.mark.parametrize(
    ("usual", "new"),
    [(DECODE, CHUNK), (DECODE, VERIFY), (CHUNK, DECODE), (VERIFY, DECODE), (CHUNK, MIXED)],
)
def test_each_kind_of_step_has_first_steps(usual, new):
    worker = Worker(60.0)
    worker.warm_up(usual)
    for step, is_early in ((usual, False), (new, True), (usual, False)):
        worker.begin(step)
        worker.check()
        assert worker.hang(3)[-1] == StillStepping(3.0, is_early)
    worker.warm_up(new)
    worker.begin(new)
    worker.check()
    assert worker.hang(3)[-1] == StillStepping(3.0)


def test_stopped_process_is_not_stuck():
    worker = Worker(10.0)
    worker.begin(DECODE)
    worker.check()
    worker.now_s += 3600.0
    assert worker.hang(2) == [None, None]
