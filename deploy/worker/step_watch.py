"""Watches from another thread whether a worker's step thread makes progress.

The step loop turns at least once a second, so a longer turn is a long step. Only this watch notices
a step that hangs: the worker's other threads go on, and its sessions stay open. The first steps of
each kind may compile code, so they get more time and are reported as early ones. Time in which the
whole process was stopped does not count.
"""

from collections import Counter

from engine.errors import StepStuck
from engine.messages import StillStepping
from engine.net.silence import Silence
from engine.worker.batch import BatchPlan, Row

LONG_STEP_S = 2.0  # longer steps are reported
NUM_FIRST_STEPS = 32  # for each kind
FIRST_STEPS_FACTOR = 2.0


class StepWatch:
    """The step thread calls `turn` and `begin`, another thread calls `look`."""

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        """A step longer than `timeout_s` counts as stuck. None: no step does."""
        self._timeout_s = timeout_s
        self._silence = Silence(now_s)
        self._num_turns = 0
        self._num_turns_seen = 0
        self._num_steps: Counter[frozenset[str]] = (
            Counter()
        )  # steps begun, by the kinds of their rows
        self._is_early = True

    def turn(self) -> None:
        """Records that the step loop begins a turn."""
        self._num_turns += 1

    def begin(self, plan: BatchPlan) -> None:
        """Records that a step begins in this turn."""
        kind = frozenset(map(_kind, plan.rows))
        self._is_early = self._num_steps[kind] < NUM_FIRST_STEPS
        self._num_steps[kind] += 1

    def check(self, now_s: float) -> StillStepping | None:
        """Returns the time of the present step if it is long, or else None.

        To be called about once a second. Raises StepStuck.
        """
        is_early = self._is_early  # read before the turns: a step may begin meanwhile
        if self._num_turns != self._num_turns_seen:
            self._silence.broken()
            self._num_turns_seen = self._num_turns
        lasted_s = self._silence.check(now_s)
        if self._timeout_s is not None:
            factor = FIRST_STEPS_FACTOR if is_early else 1.0
            if lasted_s > factor * self._timeout_s:
                raise StepStuck(lasted_s)
        return None if lasted_s <= LONG_STEP_S else StillStepping(lasted_s, is_early)


def _kind(row: Row) -> str:
    """Returns the kind of a row. Rows of a kind usually run the same code."""
    if row.max_drafted:
        return "verify"
    return "decode" if len(row.token_ids) == 1 else "chunk"
