"""The next deadline of all requests is found without a search through all of them."""

import random

from engine.config import RouterConfig
from engine.messages import RequestId
from router.machine.state import LEAST_STALE, MAX_STALE, Deadlines

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def test_soonest_is_found_and_due_ones_are_taken_once():
    deadlines = Deadlines(RouterConfig())
    assert deadlines.soonest_s() is None
    for request_id, due_s in ((A, 3.0), (B, 1.0), (C, 2.0)):
        deadlines.record(request_id, due_s)
    assert deadlines.soonest_s() == 1.0
    assert deadlines.pop_due(0.5) == set()
    assert deadlines.pop_due(2.0) == {B, C}
    assert deadlines.pop_due(2.0) == set()
    assert deadlines.soonest_s() == 3.0


def test_soonest_is_the_least_deadline_and_memory_is_bounded():
    rng = random.Random(1)
    deadlines, truth = Deadlines(RouterConfig()), {}
    for _ in range(5000):
        request_id = RequestId(f"r{rng.randrange(20)}")
        if rng.random() < 0.2:
            deadlines.remove(request_id)
            truth.pop(request_id, None)
        else:
            truth[request_id] = float(rng.randrange(100))
            deadlines.record(request_id, truth[request_id])
        assert len(deadlines._heap) <= MAX_STALE * 20 + LEAST_STALE + 1
        assert deadlines.soonest_s() == min(truth.values(), default=None)
