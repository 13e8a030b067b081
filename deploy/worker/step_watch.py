"""Whether the step thread of a worker still gets anywhere, as another thread sees it.

The step loop turns once a second at least, so a turn that lasts longer is a step. One that hangs is
noticed here and nowhere else: the worker's other threads go on, and its sessions stay open. The
first steps of each kind may have something to compile: they are given more time, and told as such.
Time in which the whole process stood still does not count.
"""

from collections import Counter

from engine.errors import StepStuck
from engine.messages import StillStepping
from engine.net.silence import Silence
from engine.worker.batch import BatchPlan, Row

LONG_STEP_S = 2.0  # what lasts longer is told
NUM_FIRST_STEPS = 32  # of each kind
FIRST_STEPS_FACTOR = 2.0


class StepWatch:
    """The step thread says what it does, `look` is another's. Plain attributes join the two."""

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        """A step that lasts longer than `timeout_s` does not end; None: nobody says so."""
        self._timeout_s = timeout_s
        self._silence = Silence(now_s)
        self._num_turns = 0
        self._num_turns_seen = 0
        self._num_steps: Counter[frozenset[str]] = Counter()  # begun, by the kinds of their rows
        self._is_early = True

    def turn(self) -> None:
        """The step loop begins anew."""
        self._num_turns += 1

    def begin(self, plan: BatchPlan) -> None:
        """A step begins, in the turn that began last."""
        kind = frozenset(map(_kind, plan.rows))
        self._is_early = self._num_steps[kind] < NUM_FIRST_STEPS
        self._num_steps[kind] += 1

    def look(self, now_s: float) -> StillStepping | None:
        """How long the present step has lasted; None where that is nothing to tell.

        To be called about once a second. Raises StepStuck.
        """
        is_early = self._is_early  # before the turns: a step that begins meanwhile is a turn too
        if self._num_turns != self._num_turns_seen:
            self._silence.broken()
            self._num_turns_seen = self._num_turns
        lasted_s = self._silence.look(now_s)
        if self._timeout_s is not None:
            factor = FIRST_STEPS_FACTOR if is_early else 1.0
            if lasted_s > factor * self._timeout_s:
                raise StepStuck(lasted_s)
        return None if lasted_s <= LONG_STEP_S else StillStepping(lasted_s, is_early)


def _kind(row: Row) -> str:
    """Rows of a kind are computed by the same code, as a rule."""
    if row.max_drafted:
        return "verify"
    return "decode" if len(row.token_ids) == 1 else "chunk"
