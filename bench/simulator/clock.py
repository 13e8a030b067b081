"""The virtual clock: a heap of future events, in order of time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final


class Rank:
    """The order of events at the same moment: plain numbers, which are looked up and compared fast.

    A message that arrives at the end of a step is handled before the next step is planned.
    """

    MESSAGE: Final = 0
    STEP_END: Final = 1
    ROUTINE: Final = 2  # reports, deadlines


class Future:
    """A heap of calls and the clock. Equal moments and ranks go in the order of planning."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._num_planned = 0
        self._is_stopped = False

    @property
    def num_events(self) -> int:
        """Events that were run, the present one included."""
        return self._num_planned - len(self._heap)

    def plan(self, at_s: float, rank: int, call: Callable[[Any], None], what: Any) -> None:
        """Plans `call(what)` for a time that has not passed."""
        self._num_planned += 1
        heappush(self._heap, (at_s, rank, self._num_planned, call, what))

    def run(self) -> None:
        """Runs events in order, until there are none or `stop` is called."""
        heap, self._is_stopped = self._heap, False
        while heap and not self._is_stopped:
            at_s, _, _, call, what = heappop(heap)
            assert at_s >= self.now_s, "time went back"
            self.now_s = at_s
            call(what)

    def stop(self) -> None:
        """Ends `run` after the present event."""
        self._is_stopped = True
