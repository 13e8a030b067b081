"""A sketch of gaps between tokens: their mean, and percentiles of a bounded error.

A histogram has bins that each are `WIDTH` wider than the one before, from a microsecond to more
than two hours. A percentile is the middle of its bin, so it is wrong by half a bin at the most.
"""

import math

import numpy as np
from numpy.typing import NDArray

from bench.common.stats import Summary

LEAST_S = 1e-6
WIDTH = 1e-3  # as a share of the gap
NUM_BINS = 23_000
NUM_TOGETHER = 2**16  # gaps are sorted into bins together, for speed

_SCALE = 1 / math.log1p(WIDTH)


class GapSketch:
    """All gaps so far, as counts."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BINS, dtype=np.int64)
        self._total_s = 0.0
        self._new: list[NDArray[np.float64]] = []
        self._num_new = 0

    def add(self, gaps_s: NDArray[np.float64]) -> None:
        """Adds the gaps of an answer."""
        self._new.append(gaps_s)
        self._num_new += len(gaps_s)
        if self._num_new >= NUM_TOGETHER:
            self._sort_in()

    def summary(self) -> Summary | None:
        """Returns the mean and the percentiles, in seconds; None without gaps."""
        self._sort_in()
        behind = np.cumsum(self._counts)
        number = int(behind[-1])
        if not number:
            return None
        p50, p90, p99 = (
            self._middle(int(np.searchsorted(behind, (number - 1) * q / 100, side="right")))
            for q in (50, 90, 99)
        )
        return Summary(self._total_s / number, p50, p90, p99)

    def _sort_in(self) -> None:
        if not self._new:
            return
        gaps_s = np.concatenate(self._new)
        self._new, self._num_new = [], 0
        self._total_s += float(gaps_s.sum())
        places = np.log(np.maximum(gaps_s, LEAST_S) / LEAST_S) * _SCALE
        bins = np.minimum(places.astype(np.int64), NUM_BINS - 1)
        self._counts += np.bincount(bins, minlength=NUM_BINS)

    @staticmethod
    def _middle(bin_: int) -> float:
        return LEAST_S * math.exp((bin_ + 0.5) / _SCALE)
