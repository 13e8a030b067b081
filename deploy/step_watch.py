"""Whether the step thread of a worker still gets anywhere, as another thread sees it.

The step loop turns once a second at least, so a turn that lasts longer is a step. One that hangs is
noticed here and nowhere else: the worker's other threads go on, and its sessions stay open. First
steps may have something to compile and are given more time. Time in which the whole process stood
still does not count.
"""

from engine.errors import StepStuck
from engine.silence import Silence

LONG_STEP_S = 2.0  # what lasts longer is told
NUM_FIRST_STEPS = 32
FIRST_STEPS_FACTOR = 10.0


class StepWatch:
    """Looks at the two numbers that the step loop counts up."""

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        """A step that lasts longer than `timeout_s` does not end; None: nobody says so."""
        self._timeout_s = timeout_s
        self._silence = Silence(now_s)
        self._num_turns = 0

    def look(self, *, num_turns: int, num_steps: int, now_s: float) -> float:
        """How long the present step has lasted; 0 where that is nothing to tell.

        To be called about once a second. Raises StepStuck.
        """
        if num_turns != self._num_turns:
            self._silence.broken()
            self._num_turns = num_turns
        lasted_s = self._silence.look(now_s)
        is_early = num_steps < NUM_FIRST_STEPS
        if self._timeout_s is not None:
            factor = FIRST_STEPS_FACTOR if is_early else 1.0
            if lasted_s > factor * self._timeout_s:
                raise StepStuck(lasted_s)
        return 0.0 if is_early or lasted_s <= LONG_STEP_S else lasted_s
