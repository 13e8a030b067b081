"""Latencies of one simulated request."""

import math
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.client.load import TBT_SHARE, SloBounds
from bench.simulator.cluster import SimulatedRequest
from router.machine.requests import Finished

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one finished answer in seconds; the last two are None for one token."""

    ttft_s: float
    e2e_s: float
    tpot_s: float | None
    tbt_s: float | None  # mean of the longest gaps


def latencies_of(record: SimulatedRequest) -> Latencies | None:
    """Returns the latencies of a request; None if it has no full answer."""
    times_s = record.times_s
    if not isinstance(record.outcome, Finished) or not times_s:
        return None
    ttft_s = times_s[0] - record.asked.arrived_s
    e2e_s = times_s[-1] - record.asked.arrived_s
    if len(times_s) == 1:
        return Latencies(ttft_s, e2e_s, None, None)
    gaps_s = gaps_of(times_s)
    tpot_s = (times_s[-1] - times_s[0]) / len(gaps_s)
    return Latencies(ttft_s, e2e_s, tpot_s, _mean_of_longest(gaps_s, TBT_SHARE))


def _mean_of_longest(values: Values, share: float) -> float:
    """Computes `bench.common.stats.mean_of_longest` for an array."""
    num_others = len(values) - math.ceil(share * len(values))
    longest = np.partition(values, num_others)[num_others:]
    return float(np.add.reduce(longest) / len(longest))  # as `mean`, in half the time


def gaps_of(times_s: "array[float]") -> Values:
    """Returns the seconds between the tokens of an answer; empty for less than two."""
    values: Values = np.frombuffer(times_s) if times_s else np.empty(0)
    return values[1:] - values[:-1]


def meets(latencies: Latencies | None, slo: SloBounds) -> bool:
    """True if TTFT and TPOT are inside their bounds."""
    return latencies is not None and slo.hold(latencies.ttft_s, latencies.tpot_s)
