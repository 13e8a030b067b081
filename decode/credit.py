"""Limits the cost of drafting that does not pay: to a small share of all time for each purpose.

    looks         searches that find no draft worth its cost, and drafts that lose time. Time that
                  drafts gain is credited, so each step has a look while drafts pay
    trials        drafts that are not expected to pay
    catching up   passes in which the draft model computes tokens that it left out

So speculation never costs more than the sum of these shares plus the saved credit, even if all its
estimates are wrong.
"""

SHARES = {"looks": 0.01, "trials": 0.002, "catching up": 0.003}  # share of all time
_CREDIT_STEPS = {"looks": 4, "trials": 6, "catching up": 4}  # maximum credit, in times of a step
_EARN_EVERY = 16  # steps whose time is credited together
_NEARLY = 0.9


class TimeCredit:
    """Credit in seconds for each purpose in `SHARES`. Steps add credit; spending subtracts it."""

    def __init__(self) -> None:
        self._credit_s = dict.fromkeys(SHARES, 0.0)
        self._step_s: float | None = None  # average time of recent steps
        self._earned_s, self._num_earned = 0.0, 0  # seconds and steps not credited yet

    def earn(self, seconds: float, num_steps: int = 1) -> None:
        """Adds the credit for `num_steps` steps that took `seconds`."""
        if self._step_s is None:
            self._step_s = seconds / num_steps
            # The first full blocks and the first looks need not wait for credit.
            for purpose in ("looks", "catching up"):
                self._credit_s[purpose] = self._most_s(purpose)
        self._earned_s += min(seconds, 2 * self._step_s * num_steps)
        self._num_earned += num_steps
        if self._num_earned < _EARN_EVERY:
            return
        self._step_s += 0.5 * (self._earned_s / self._num_earned - self._step_s)
        for purpose, share in SHARES.items():
            self.add(purpose, share * self._earned_s)
        self._earned_s, self._num_earned = 0.0, 0

    def of(self, purpose: str) -> float:
        """Returns the seconds that may be spent on a purpose."""
        return self._credit_s[purpose]

    def is_nearly_full(self, purpose: str) -> bool:
        """True if waiting would add little to the credit."""
        return self._credit_s[purpose] > _NEARLY * self._most_s(purpose)

    def add(self, purpose: str, seconds: float) -> None:
        """Credits seconds that were gained or not spent; negative seconds reduce the credit."""
        self._credit_s[purpose] = min(self._credit_s[purpose] + seconds, self._most_s(purpose))

    def spend(self, purpose: str, seconds: float) -> bool:
        """Subtracts seconds from the credit. Returns False, and subtracts none, without credit."""
        if self._credit_s[purpose] < seconds:
            return False
        self._credit_s[purpose] -= seconds
        return True

    def _most_s(self, purpose: str) -> float:
        return _CREDIT_STEPS[purpose] * (self._step_s or 0.0)
