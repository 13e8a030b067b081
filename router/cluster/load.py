"""How busy prompts lately kept the workers that prefill, and what their caches saved."""

from math import exp

MEMORY_S = 5.0  # older prompts count for less than a third
KEPT = 0.98  # weight of a prompt in what caches saved, after the next one


class PromptLoad:
    """The seconds of prompts that were lately placed, of which older ones count less."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._noted_s = 0.0
        self._compute_s = self._num_computed = self._num_cached = 0.0  # recent sums

    def record(self, seconds: float, now_s: float, *, num_computed: int, num_cached: int) -> None:
        """Adds a prompt: `num_computed` tokens took `seconds`, `num_cached` were cached."""
        self._seconds = self._left(now_s) + seconds
        self._noted_s = now_s
        self._compute_s = KEPT * self._compute_s + seconds
        self._num_computed = KEPT * self._num_computed + num_computed
        self._num_cached = KEPT * self._num_cached + num_cached

    @property
    def cached_token_s(self) -> float:
        """Seconds that a cached token saves prompts, by the share of tokens that are found."""
        if self._num_computed <= 0.0:
            return 0.0
        found = self._num_cached / (self._num_cached + self._num_computed)
        return found * self._compute_s / self._num_computed

    def share(self, num_workers: int, now_s: float) -> float:
        """Returns the share of their time that so many workers computed prompts; above 1 if they
        could not keep up.
        """
        return self._left(now_s) / (MEMORY_S * max(num_workers, 1))

    def _left(self, now_s: float) -> float:
        return self._seconds * exp((self._noted_s - now_s) / MEMORY_S)
