"""Time series of a measured or simulated run, for plots. Pure.

Points are latencies by the due time of their request. Lines are percentiles of the points of a bin,
requests in flight at a moment, and requests or tokens a second within a bin. A short run has fewer
bins, so that most of them hold several requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.common.stats import percentile

MOST_BINS = 60
LEAST_BINS = 10
REQUESTS_IN_A_BIN = 6  # average per bin, if there are fewer than `MOST_BINS` bins
NUM_MOMENTS = 300  # moments at which requests in flight are counted
PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One request on the run's clock, in seconds. A failed request has no first token."""

    due_s: float
    first_s: float | None
    end_s: float
    num_tokens: int

    @property
    def ttft_ms(self) -> float | None:
        """Returns the time from the due time to the first token; None without a token."""
        return None if self.first_s is None else (self.first_s - self.due_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Returns the mean time per token after the first; None if there is none."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_tokens - 1) * 1e3


@dataclass(frozen=True, slots=True)
class TimeBins:
    """Equal parts of a run, from its start to its end."""

    width_s: float
    number: int

    @classmethod
    def over(cls, spans: Sequence[RequestSpan]) -> "TimeBins":
        """Returns the bins for these requests; there must be at least one request."""
        end_s = max(span.end_s for span in spans) or 1.0
        number = min(max(len(spans) // REQUESTS_IN_A_BIN, LEAST_BINS), MOST_BINS)
        return cls(end_s / number, number)

    def place(self, at_s: float) -> int:
        """Returns the index of the bin that contains this time."""
        return min(max(int(at_s / self.width_s), 0), self.number - 1)

    @property
    def middles(self) -> list[float]:
        """Returns the time in the middle of each bin."""
        return [(place + 0.5) * self.width_s for place in range(self.number)]

    def per_second(self, times_s: Sequence[float]) -> list[float]:
        """Returns the events per second in each bin."""
        counts = [0.0] * self.number
        for at_s in times_s:
            counts[self.place(at_s)] += 1 / self.width_s
        return counts

    def token_rate(self, spans: Sequence[RequestSpan]) -> list[float]:
        """Returns the output tokens per second in each bin. An answer's tokens are spread evenly
        over its time.
        """
        rates = [0.0] * self.number
        for span in spans:
            if span.first_s is None:
                continue
            first, last = self.place(span.first_s), self.place(span.end_s)
            length_s = span.end_s - span.first_s
            if first == last or length_s <= 0:
                rates[last] += span.num_tokens / self.width_s
                continue
            for number in range(first, last + 1):
                begin_s, end_s = number * self.width_s, (number + 1) * self.width_s
                part_s = min(span.end_s, end_s) - max(span.first_s, begin_s)
                rates[number] += span.num_tokens * max(part_s, 0.0) / length_s / self.width_s
        return rates


@dataclass(frozen=True, slots=True)
class TimePanel:
    """One plot over time: points, lines by name, and a bound across it."""

    title: str  # title of the plot, with the unit
    points: tuple[Sequence[float], Sequence[float]] | None = None
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    bound: float | None = None
    is_log: bool = False


def panels_of(
    spans: Sequence[RequestSpan],
    *,
    bound_ttft_ms: float | None = None,
    bound_tpot_ms: float | None = None,
) -> list[TimePanel]:
    """Returns the panels of one run: TTFT, TPOT, requests in flight, rates, output tokens.

    A latency that no request has is left out.
    """
    if not spans:
        return []
    bins = TimeBins.over(spans)
    end_s = bins.width_s * bins.number
    moments = [end_s * number / NUM_MOMENTS for number in range(NUM_MOMENTS + 1)]
    ttft = [(s.due_s, ms) for s in spans if (ms := s.ttft_ms) is not None]
    tpot = [(s.due_s, ms) for s in spans if (ms := s.tpot_ms) is not None]
    failed = [span.end_s for span in spans if span.first_s is None]
    rates = {
        "due": bins.per_second([s.due_s for s in spans]),
        "answered": bins.per_second([s.end_s for s in spans if s.first_s is not None]),
    }
    if failed:
        rates["failed"] = bins.per_second(failed)
    latencies = [
        _latency_panel(title, samples, bins, bound)
        for title, samples, bound in (
            ("TTFT from due time (ms)", ttft, bound_ttft_ms),
            ("TPOT (ms)", tpot, bound_tpot_ms),
        )
        if samples
    ]
    return [
        *latencies,
        TimePanel("requests in flight", lines={"": (moments, in_flight(spans, moments))}),
        TimePanel("requests/s", lines={name: (bins.middles, rate) for name, rate in rates.items()}),
        TimePanel("output tokens/s", lines={"": (bins.middles, bins.token_rate(spans))}),
    ]


def in_flight(spans: Sequence[RequestSpan], at_s: Sequence[float]) -> list[float]:
    """Returns the number of requests that are due and unfinished at each of these ascending
    times.
    """
    begins, ends = sorted(s.due_s for s in spans), sorted(s.end_s for s in spans)
    counts: list[float] = []
    num_begun = num_ended = 0
    for moment_s in at_s:
        while num_begun < len(begins) and begins[num_begun] <= moment_s:
            num_begun += 1
        while num_ended < len(ends) and ends[num_ended] <= moment_s:
            num_ended += 1
        counts.append(num_begun - num_ended)
    return counts


def _latency_panel(
    title: str, samples: Sequence[tuple[float, float]], bins: TimeBins, bound: float | None
) -> TimePanel:
    by_place: dict[int, list[float]] = {}
    for at_s, value in samples:
        by_place.setdefault(bins.place(at_s), []).append(value)
    places = sorted(by_place)
    middles = [bins.middles[place] for place in places]
    return TimePanel(
        title,
        points=([at_s for at_s, _ in samples], [value for _, value in samples]),
        lines={
            f"p{q}": (middles, [percentile(by_place[place], q) for place in places])
            for q in PERCENTILES
        },
        bound=bound,
        is_log=True,
    )
