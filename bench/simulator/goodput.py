"""DistServe's goodput: the highest rate, per GPU, at which enough requests keep both bounds.

The whole trace is sped up or slowed down. At the reported rate, nine of ten requests have TTFT and
TPOT inside their bounds; a refused or failed request counts as outside. One simulation tests one
rate. The search tests several rates, between `LEAST` and `MOST` times the trace's own rate, and is
exact to about 5 %. It assumes that every rate above a failing rate fails too.

Source: Zhong et al., DistServe, OSDI 2024, §2.2: "the maximum request rate that can be served
adhering to the SLO attainment goal (say, 90%) for each GPU provisioned".

Other figures are updated with each finished request, so that requests need not be kept in memory:

latencies_of    latencies of one request
RequestTally    columns of latencies, and counts
GapSketch       gaps between tokens: their mean, and percentiles with a bounded error
InfiniteCache   a prefix cache that never evicts, and the share of prompt tokens that hit it
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from bench.client.load import TBT_SHARE, SloBounds
from bench.common.report import Figure
from bench.common.stats import Summary
from bench.simulator.cluster import SimulatedRequest, SimulatedRun
from bench.simulator.traces import Trace, TraceRequest
from router.machine.requests import Finished

ATTAINMENT = 0.9
LEAST, MOST = 1 / 16, 16.0
NUM_HALVINGS = 4  # halvings after the rate is known up to a factor of two

Simulate = Callable[[Trace], SimulatedRun]


def distserve_goodput(
    trace: Trace, simulate: Simulate, slo: SloBounds, *, gpus: int
) -> dict[str, Figure]:
    """Returns the result `goodput/distserve`; empty if there is no bound or the trace has no
    rate.
    """
    is_bounded = slo.ttft_s is not None or slo.tpot_s is not None
    if not is_bounded or not trace.duration_s:
        return {}
    rate_per_s = attained_per_s(trace, simulate, slo)
    return {"goodput/distserve": Figure(rate_per_s / gpus, "1/s/GPU")}


def attained_per_s(
    trace: Trace, simulate: Simulate, slo: SloBounds, *, num_halvings: int = NUM_HALVINGS
) -> float:
    """Returns the highest rate, in requests/s, at which enough requests meet both bounds."""
    speed = greatest_speed(
        lambda speed_up: attainment(simulate(trace.sped_up(speed_up)), slo) >= ATTAINMENT,
        least=LEAST,
        most=MOST,
        num_halvings=num_halvings,
    )
    return speed * len(trace.requests) / trace.duration_s


def attainment(run: SimulatedRun, slo: SloBounds) -> float:
    """Returns the share of requests with TTFT and TPOT inside their bounds."""
    return sum(meets(latencies_of(r), slo) for r in run.records) / len(run.records)


def greatest_speed(
    keeps: Callable[[float], bool],
    *,
    least: float,
    most: float,
    num_halvings: int = NUM_HALVINGS,
) -> float:
    """Returns the greatest speed-up factor for which `keeps` returns True; 0 if `least` already
    fails.
    """
    low = 1.0
    while not keeps(low):
        if low <= least:
            return 0.0
        low /= 2
    high = 2 * low
    if low == 1.0:
        while high <= most and keeps(high):
            low, high = high, 2 * high
    if high > most:
        return low
    for _ in range(num_halvings):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one finished answer in seconds. TPOT and TBT are None for an answer of one
    token.
    """

    ttft_s: float
    e2e_s: float
    tpot_s: float | None
    tbt_s: float | None  # mean of the longest gaps (Mooncake's TBT)


def latencies_of(record: SimulatedRequest) -> Latencies | None:
    """Returns the latencies of a request; None if its answer is not complete."""
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
    """Computes `bench.common.stats.mean_of_longest` on an array."""
    num_others = len(values) - math.ceil(share * len(values))
    longest = np.partition(values, num_others)[num_others:]
    return float(np.add.reduce(longest) / len(longest))  # equal to `mean`, in half of the time


def gaps_of(times_s: "array[float]") -> Values:
    """Returns the seconds between the tokens of an answer; empty for fewer than two tokens."""
    values: Values = np.frombuffer(times_s) if times_s else np.empty(0)
    return values[1:] - values[:-1]


def meets(latencies: Latencies | None, slo: SloBounds) -> bool:
    """Returns True if TTFT and TPOT are inside their bounds."""
    return latencies is not None and slo.hold(latencies.ttft_s, latencies.tpot_s)


class RequestTally:
    """The results of all requests added so far. All columns list the finished answers in the same
    order.
    """

    def __init__(self) -> None:
        self.number = 0  # number of all requests, whatever their outcome
        self.ttft_s = array("d")
        self.e2e_s = array("d")
        self._tpot_s = array("d")  # column; NaN for answers of one token
        self._tbt_s = array("d")  # column; NaN for answers of one token
        self.kinds: Counter[str] = Counter()  # number of requests by outcome
        self.num_retried = 0
        self.num_input_tokens = 0  # tokens of all prompts
        # tokens of prompts whose answer has a first token, cached tokens included
        self.num_prefilled_tokens = 0
        self.num_cached_tokens = 0  # cached tokens among the prefilled tokens
        self.num_output_tokens = 0

    @classmethod
    def of(cls, records: Iterable[SimulatedRequest]) -> "RequestTally":
        """Returns a tally of these requests."""
        tally = cls()
        for record in records:
            tally.add(record)
        return tally

    def add(self, record: SimulatedRequest) -> None:
        """Adds a finished request."""
        self.number += 1
        self.kinds[type(record.outcome).__name__.lower()] += 1
        asked, timeline, num_tokens = record.asked, record.timeline, len(record.times_s)
        self.num_input_tokens += asked.input_len
        self.num_output_tokens += num_tokens
        if timeline is not None:
            self.num_retried += timeline.attempts > 1
        if timeline is not None and num_tokens:
            self.num_prefilled_tokens += asked.input_len
            self.num_cached_tokens += timeline.num_cached_tokens
        latencies = latencies_of(record)
        if latencies is not None:
            self.ttft_s.append(latencies.ttft_s)
            self.e2e_s.append(latencies.e2e_s)
            self._tpot_s.append(nan if latencies.tpot_s is None else latencies.tpot_s)
            self._tbt_s.append(nan if latencies.tbt_s is None else latencies.tbt_s)

    @property
    def tpot_s(self) -> list[float]:
        """Returns the TPOT of each answer with more than one token."""
        return [value_s for value_s in self._tpot_s if not isnan(value_s)]

    def num_within(self, slo: SloBounds) -> int:
        """Returns the number of answers with TTFT and TPOT inside the bounds."""
        return sum(map(slo.hold, self.ttft_s, _or_none(self._tpot_s)))

    def num_effective(self, slo: SloBounds) -> int:
        """Returns the number of answers with TTFT and TBT inside the bounds."""
        return sum(map(slo.hold, self.ttft_s, _or_none(self._tbt_s)))


def _or_none(column: Iterable[float]) -> Iterator[float | None]:
    return (None if isnan(value_s) else value_s for value_s in column)


# ---------------------------------------------------------------- gaps

LEAST_S = 1e-6
WIDTH = 1e-3  # width of a bin, as a share of the gap
NUM_BINS = 23_000
NUM_TOGETHER = 2**16  # number of gaps that are sorted into bins together, for speed

_SCALE = 1 / math.log1p(WIDTH)


class GapSketch:
    """Counts of all gaps so far, by bins.

    Each bin is `WIDTH` wider than the one before, from a microsecond to more than two hours. A
    percentile is the middle of its bin, so its error is at most half a bin.
    """

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
        """Returns the mean and the percentiles of all gaps in seconds; None without gaps."""
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


# ---------------------------------------------------------------- an infinite cache

PAGE_BITS = 16  # each page has the bits of 2^16 ids


class InfiniteCache:
    """The set of all blocks of the requests so far: one bit per block, in pages of neighbouring
    ids.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._pages: dict[int, bytearray] = {}
        self._num_hit = self._num_tokens = 0  # prompt tokens that hit, and all prompt tokens

    @property
    def hits(self) -> float:
        """Returns the share of prompt tokens that were in the cache when their request arrived."""
        return self._num_hit / self._num_tokens if self._num_tokens else 0.0

    def see(self, request: TraceRequest) -> None:
        """Counts the hits of a request, then adds its full blocks.

        A prompt's last token never hits, since it must be computed to sample the first token.
        """
        usable = (request.input_len - 1) // self._block_tokens
        leading = 0
        for block_id in request.block_ids[:usable]:
            if not self._holds(block_id):
                break
            leading += 1
        self._num_hit += leading * self._block_tokens
        self._num_tokens += request.input_len
        for block_id in request.block_ids[leading : request.input_len // self._block_tokens]:
            self._add(block_id)

    def watch(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Yields the requests unchanged, and calls `see` with each."""
        for request in requests:
            self.see(request)
            yield request

    def _holds(self, block_id: int) -> bool:
        page = self._pages.get(block_id >> PAGE_BITS)
        at = block_id & (1 << PAGE_BITS) - 1
        return page is not None and bool(page[at >> 3] & 1 << (at & 7))

    def _add(self, block_id: int) -> None:
        page = self._pages.setdefault(block_id >> PAGE_BITS, bytearray(1 << PAGE_BITS - 3))
        at = block_id & (1 << PAGE_BITS) - 1
        page[at >> 3] |= 1 << (at & 7)


def infinite_cache_hits(trace: Trace) -> float:
    """Returns the share of prompt tokens that would hit an infinite cache."""
    cache = InfiniteCache(trace.block_tokens)
    for request in trace.requests:
        cache.see(request)
    return cache.hits
