"""The virtual clock: a heap of future events, in order of time."""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any


class Rank(IntEnum):
    """The order of events at the same moment.

    A message that arrives when a step ends is there before the next step is planned.
    """

    MESSAGE = 0
    STEP_END = 1
    ROUTINE = 2  # reports, deadlines


class Future:
    """A heap of calls and the clock. Equal moments and ranks go in the order of planning."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._num_planned = 0

    def plan(self, at_s: float, rank: Rank, call: Callable[[Any], None], what: Any) -> None:
        """Plans `call(what)` for a time that has not passed."""
        self._num_planned += 1
        heappush(self._heap, (at_s, rank, self._num_planned, call, what))

    def step(self) -> bool:
        """Runs the next event. Returns False if there is none."""
        if not self._heap:
            return False
        at_s, _, _, call, what = heappop(self._heap)
        assert at_s >= self.now_s, "time went back"
        self.now_s = at_s
        self.num_events += 1
        call(what)
        return True
