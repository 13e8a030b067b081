"""Limits the time spent on trials and on catching up to a small share of all time."""

SHARES = {"trials": 0.006, "catching up": 0.01}  # of all time
_CREDIT_STEPS = {"trials": 1600, "catching up": 400}  # steps whose share is kept if unused
_EARN_EVERY = 16  # steps whose time is credited together
_NEARLY = 0.9


class TimeCredit:
    """Credit in seconds for each purpose in `SHARES`. Steps earn it; what is spent is taken off."""

    def __init__(self) -> None:
        self._credit_s = dict.fromkeys(SHARES, 0.0)
        self._step_s: float | None = None  # the time of recent steps
        self._earned_s, self._num_earned = 0.0, 0  # seconds and steps not credited yet

    def earn(self, seconds: float, num_steps: int = 1) -> None:
        """Notes the time of steps."""
        if self._step_s is None:
            self._step_s = seconds / num_steps
            # Blocks that fill at once need not wait.
            self._credit_s["catching up"] = self._most_s("catching up")
        self._earned_s += min(seconds, 2 * self._step_s * num_steps)
        self._num_earned += num_steps
        if self._num_earned < _EARN_EVERY:
            return
        self._step_s += 0.5 * (self._earned_s / self._num_earned - self._step_s)
        for purpose, share in SHARES.items():
            credit_s = self._credit_s[purpose] + share * self._earned_s
            self._credit_s[purpose] = min(credit_s, self._most_s(purpose))
        self._earned_s, self._num_earned = 0.0, 0

    def of(self, purpose: str) -> float:
        """Returns the seconds that may be spent."""
        return self._credit_s[purpose]

    def is_nearly_full(self, purpose: str) -> bool:
        """True if waiting would add little to the credit."""
        return self._credit_s[purpose] > _NEARLY * self._most_s(purpose)

    def add(self, purpose: str, seconds: float) -> None:
        """Gives back what was not spent after all; negative if more was spent."""
        self._credit_s[purpose] += seconds

    def spend(self, purpose: str, seconds: float) -> bool:
        """Takes seconds off the credit. Returns False, and takes none, if there is too little."""
        if self._credit_s[purpose] < seconds:
            return False
        self._credit_s[purpose] -= seconds
        return True

    def _most_s(self, purpose: str) -> float:
        return SHARES[purpose] * _CREDIT_STEPS[purpose] * (self._step_s or 0.0)
