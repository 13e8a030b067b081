"""Summaries of samples of numbers, with the benchmarks' only definition of a percentile.

`percentile` interpolates linearly between order statistics: for n sorted values x[0..n-1] and q in
[0, 100] it is the value at the real-valued index (n - 1)·q/100. That is type 7 of Hyndman & Fan,
The American Statistician 50(4), 1996: numpy's default and `statistics.quantiles(inclusive)`.
So the p99 of fewer than 100 values lies between the two largest values: report n together with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and three percentiles of one sample, in the unit of the sample."""

    mean: float
    p50: float
    p90: float
    p99: float


def percentile(values: Sequence[float], q: float) -> float:
    """Returns the q-th percentile of `values`, in any order. Raises ValueError."""
    return _percentile_of_sorted(sorted(values), q)


def summarize(values: Sequence[float]) -> Summary | None:
    """Returns the summary of `values`; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (_percentile_of_sorted(ordered, q) for q in (50, 90, 99))
    return Summary(mean=math.fsum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99)


def mean_of_longest(values: Sequence[float], share: float) -> float:
    """Returns the mean of the ⌈share·n⌉ largest of n values. Raises ValueError."""
    if not values or not 0 < share <= 1:
        raise ValueError(f"{share} of {len(values)} values has no mean")
    longest = sorted(values)[-math.ceil(share * len(values)) :]
    return math.fsum(longest) / len(longest)


def _percentile_of_sorted(ordered: Sequence[float], q: float) -> float:
    if not ordered or not 0 <= q <= 100:
        raise ValueError(f"percentile {q} of {len(ordered)} values is not defined")
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
