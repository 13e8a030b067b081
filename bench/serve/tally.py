"""Counts of a running load, for its progress. Processes share them without a lock.

Each process writes only its own array, and readers may see a count that is a moment old.
"""

from collections.abc import MutableSequence, Sequence

from bench.client.answers import Answer
from bench.client.load import RequestOutcome, SloBounds, meets

NUM_COUNTS = 6
BEGUN, ENDED, FAILED, TOKENS, TTFT_S, WITHIN = range(NUM_COUNTS)


class Tally:
    """Counts of one client process."""

    def __init__(
        self, counts: MutableSequence[float] | None = None, slo: SloBounds | None = None
    ) -> None:
        self._counts = [0.0] * NUM_COUNTS if counts is None else counts
        self._slo = slo or SloBounds()

    def begun(self) -> None:
        """Counts a request that is about to be sent."""
        self._counts[BEGUN] += 1

    def ended(self, outcome: RequestOutcome) -> None:
        """Counts the end of a request."""
        result = outcome.result
        self._counts[ENDED] += 1
        if isinstance(result, Answer):
            self._counts[TOKENS] += result.num_output_tokens
            self._counts[TTFT_S] += result.ttft_s + outcome.delay_s
            self._counts[WITHIN] += meets(result, self._slo, delay_s=outcome.delay_s)
        else:
            self._counts[FAILED] += 1


def told(counts: Sequence[float], slo: SloBounds | None = None) -> str:
    """One line about the counts of all processes, summed."""
    ended = counts[ENDED]
    answered = ended - counts[FAILED]
    mean_ms = counts[TTFT_S] / answered * 1e3 if answered else 0.0
    parts = [
        f"{counts[BEGUN] - ended:.0f} in flight",
        f"{counts[FAILED]:.0f} failed" if counts[FAILED] else "",
        f"TTFT {mean_ms:.0f} ms",
        f"{counts[WITHIN] / ended:.0%} in bounds" if slo and ended else "",
        f"{counts[TOKENS]:.0f} tokens",
    ]
    return " · ".join(part for part in parts if part)
