"""Series that are cheap to count: histograms, the bounds of their buckets, and the usage by API
key.

The name of a key is the value of the label. Each of the first `MAX_KEYS_SHOWN` used keys gets its
own series. All later keys share the series `other`, so that a file of 10,000 keys does not create
10,000 series. Requests without a key have an empty label, which Prometheus drops.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

# fmt: off
TTFT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)
ITL_BUCKETS_S = (
    0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1, 2.5, 5, 10, 20, 40, 80,
)
E2E_BUCKETS_S = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920,
)
STAGE_BUCKETS_S = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1, 2.5, 5, 10, 30, 60, 300,
)
LENGTH_BUCKETS_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000,
)
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
# fmt: on


MAX_KEYS_SHOWN = 200
OTHER = "other"  # label of all further keys, and of a key that has this name


class Buckets:
    """The counts of one histogram series, in arrays that `router.text.native` updates too."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = array("d", bounds)
        self.counts = array("q", [0] * (len(bounds) + 1))  # last item: values above all bounds
        self.total = array("d", [0.0])

    def observe(self, value: float) -> None:
        """Counts a value in its bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total[0] += value


class Histogram:
    """A histogram that counts by bucket, without a lock.

    The histogram of prometheus_client needs a lock and a method call for each bucket.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        *,
        labels: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], Buckets] = {}
        if not labels:
            self.series()

    def series(self, labels: tuple[str, ...] = ()) -> Buckets:
        """Returns the series with these labels.

        A caller that observes often should keep the series.
        """
        series = self._series.get(labels)
        if series is None:
            self._series[labels] = series = Buckets(self._bounds)
        return series

    def observe(self, value: float, labels: tuple[str, ...] = ()) -> None:
        """Counts a value in the series with these labels."""
        series = self._series.get(labels) or self.series(labels)
        series.counts[bisect_left(series.bounds, value)] += 1  # as in `series.observe`
        series.total[0] += value

    def observe_each(
        self, labels: Iterable[tuple[str, ...]], values: Iterable[float | None]
    ) -> None:
        """Counts one value in each of several series. Values None are skipped."""
        for each, value in zip(labels, values, strict=True):
            if value is not None:
                series = self._series.get(each) or self.series(each)
                series.counts[bisect_left(series.bounds, value)] += 1  # as in `series.observe`
                series.total[0] += value

    def collect(self) -> Iterator[Metric]:
        """Yields the histogram's family, with the present counts of all series."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, series in self._series.items():
            buckets = zip(bounds, accumulate(series.counts), strict=True)
            family.add_metric(labels, list(buckets), series.total[0])
        yield family


class UsageOfKey:
    """The counts of requests and tokens of one API key."""

    __slots__ = ("num_cached_tokens", "num_generation_tokens", "num_prompt_tokens", "num_requests")

    def __init__(self) -> None:
        self.num_requests = 0  # requests that passed all checks
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens found in caches
        self.num_generation_tokens = 0


class KeyUsage:
    """The counts of requests and tokens of all API keys in one process."""

    def __init__(self, max_shown: int = MAX_KEYS_SHOWN) -> None:
        self._max_shown = max_shown
        self._by_key: dict[str, UsageOfKey] = {}

    def of(self, key: str) -> UsageOfKey:
        """Returns the counts of a key, or the shared counts if too many other keys were used
        before.
        """
        use = self._by_key.get(key)
        if use is None:
            if len(self._by_key) >= self._max_shown:
                key = OTHER
            use = self._by_key.setdefault(key, UsageOfKey())
        return use

    def families(self) -> Iterator[Metric]:
        """Yields the counters of all API keys."""
        requests = CounterMetricFamily(
            "baton_key_requests", "Valid requests of an API key", labels=["key"]
        )
        tokens = CounterMetricFamily(
            "baton_key_tokens",
            "Tokens of an API key, by kind: prompt or generation",
            labels=["key", "kind"],
        )
        cached = CounterMetricFamily(
            "baton_key_cached_tokens", "Tokens of prompts found in caches", labels=["key"]
        )
        for key, use in self._by_key.items():
            requests.add_metric([key], use.num_requests)
            tokens.add_metric([key, "prompt"], use.num_prompt_tokens)
            tokens.add_metric([key, "generation"], use.num_generation_tokens)
            cached.add_metric([key], use.num_cached_tokens)
        yield from (requests, tokens, cached)
