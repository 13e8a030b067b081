"""The history of the pools for operators: the latest steps, and counters."""

from collections import Counter, deque

from engine.control import HistoryStep
from engine.messages import Role

MAX_STEPS_KEPT = 1000


class PoolHistory:
    """The latest steps in order, and how often each kind of trouble happened."""

    def __init__(self) -> None:
        self.steps: deque[HistoryStep] = deque(maxlen=MAX_STEPS_KEPT)
        self.counters: Counter[str] = Counter()
        self._num_steps = 0

    def record(
        self, now_s: float, subject: str, what: str, why: str = "", *, role: Role | None = None
    ) -> HistoryStep:
        """Records a step and returns it, as the effect that reports it."""
        self._num_steps += 1
        what = what.removeprefix(f"{subject} ")
        step = HistoryStep(self._num_steps, now_s, subject, what, why, role)
        self.steps.append(step)
        return step
