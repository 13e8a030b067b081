"""How busy prompts lately kept the workers that prefill."""

from math import exp

MEMORY_S = 1.0  # older prompts count for less than a third


class PromptLoad:
    """The seconds of prompts that were lately placed, of which older ones count less."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._noted_s = 0.0

    def note(self, seconds: float, now_s: float) -> None:
        """Adds a prompt that takes so long to compute."""
        self._seconds = self._left(now_s) + seconds
        self._noted_s = now_s

    def share(self, num_workers: int, now_s: float) -> float:
        """Returns the share of their time that so many workers computed prompts; above 1 if they
        could not keep up.
        """
        return self._left(now_s) / (MEMORY_S * max(num_workers, 1))

    def _left(self, now_s: float) -> float:
        return self._seconds * exp((self._noted_s - now_s) / MEMORY_S)
