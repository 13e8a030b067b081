"""Plots as PNG files or SVG texts, and the time series of a run that they show.

A point is the latency of one request at its due time. Lines are percentiles of the points in a time
bin, requests in flight at a moment, and requests or tokens per second in a bin. A short run has
fewer bins, so that most bins have several requests.

matplotlib is optional (`pip install baton-serve[bench]`) and is imported only for plotting.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log10, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.report import Report
from bench.common.stats import percentile
from engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BINS = 60
LEAST_BINS = 10
# average number of requests per bin, if there are fewer than `MOST_BINS` bins
REQUESTS_IN_A_BIN = 6
NUM_MOMENTS = 300  # number of moments at which requests in flight are counted
PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The times of one request in seconds, on the run's clock. A failed request has no first
    token.
    """

    due_s: float
    first_s: float | None
    end_s: float
    num_tokens: int

    @property
    def ttft_ms(self) -> float | None:
        """Returns the milliseconds from the due time to the first token; None without a token."""
        return None if self.first_s is None else (self.first_s - self.due_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Returns the mean milliseconds per token after the first; None if there is no such
        token.
        """
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_tokens - 1) * 1e3


@dataclass(frozen=True, slots=True)
class TimeBins:
    """A run, divided into time bins of equal length."""

    width_s: float
    number: int

    @classmethod
    def over(cls, spans: Sequence[RequestSpan]) -> "TimeBins":
        """Divides the run of these requests into bins. There must be at least one request."""
        end_s = max(span.end_s for span in spans) or 1.0
        number = min(max(len(spans) // REQUESTS_IN_A_BIN, LEAST_BINS), MOST_BINS)
        return cls(end_s / number, number)

    def place(self, at_s: float) -> int:
        """Returns the index of the bin that contains this time."""
        return min(max(int(at_s / self.width_s), 0), self.number - 1)

    @property
    def middles(self) -> list[float]:
        """Returns the middle of each bin in seconds."""
        return [(place + 0.5) * self.width_s for place in range(self.number)]

    def per_second(self, times_s: Sequence[float]) -> list[float]:
        """Returns the events per second in each bin."""
        counts = [0.0] * self.number
        for at_s in times_s:
            counts[self.place(at_s)] += 1 / self.width_s
        return counts

    def token_rate(self, spans: Sequence[RequestSpan]) -> list[float]:
        """Returns the output tokens per second in each bin. An answer's tokens count as evenly
        spread from its first token to its end.
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
    """One plot over time: points, named lines, and a bound as a horizontal line."""

    title: str  # title with the unit
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

    A latency without any value has no panel.
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
    """Returns the number of requests in flight at each of these ascending times. A request is in
    flight from its due time to its end.
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


PANELS_IN_A_ROW = 3
PANEL_INCHES = 2.2  # height in inches of a panel over time
MOST_POINTS = 2000  # a panel with more points than this draws them as an image
# decades of a log axis: up to NARROW it has most labels, from WIDE on only powers of ten
NARROW, WIDE = 0.8, 2.5
INK = "#010203"  # placeholder colour, which the page's text colour replaces in an SVG
GREY = "#888888"  # a grey that is visible on light and on dark pages


def require_matplotlib(option: str = "--plot") -> None:
    """Raises ConfigError if matplotlib is missing. Call it before a run, so that the run is not
    wasted.
    """
    try:
        import matplotlib  # noqa: F401 (looked for, not used)
    except ImportError as error:
        message = f"{option} needs matplotlib: pip install 'baton-serve[bench]'"
        raise ConfigError(message) from error


def plot_load(
    series_ms: Mapping[str, Sequence[float]],
    panels: Sequence[TimePanel],
    path: Path,
    *,
    title: str,
    bounds_ms: Mapping[str, float | None] | None = None,
) -> None:
    """Draws the distributions of latencies, and below them the load over time."""
    from matplotlib.figure import Figure

    heights = [1.3, len(panels) or 0.1]
    figure = Figure(figsize=(10, PANEL_INCHES * sum(heights)), layout="constrained")
    top, rest = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    axes = top.subplots(1, len(series_ms), squeeze=False)[0]
    for axis, (name, values_ms) in zip(axes, series_ms.items(), strict=True):
        draw_cdf(axis, name, values_ms, bound=(bounds_ms or {}).get(name))
    draw_panels(rest, panels)
    save_figure(figure, path, title=title)


def draw_cdf(axis: Any, name: str, values_ms: Sequence[float], *, bound: float | None) -> None:
    """Draws the share of values at or below each latency on a log axis, with the latency's
    bound.
    """
    positive = [value for value in values_ms if value > 0]
    if positive:
        axis.ecdf(positive)
        axis.set_xscale("log")
    axis.set(xlabel=f"{name} (ms)", ylabel="share of values", ylim=(0, 1))
    axis.set_title(f"n = {len(values_ms)}", fontsize="small")
    if bound is not None:
        axis.axvline(bound, color="tab:red", linestyle="--", label="SLO")
        axis.legend(fontsize="x-small")
    if positive:
        _plain(axis.xaxis)
    axis.grid(alpha=0.3, which="both")


def draw_panels(figure: Any, panels: Sequence[TimePanel]) -> None:
    """Draws panels below each other, with a shared time axis."""
    if not panels:
        return
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_over_time(axis, panel)
    axes[-1].set(xlabel="time (s)", xlim=(0, None))


def _draw_over_time(axis: Any, panel: TimePanel) -> None:
    """Draws one panel over time: points, lines and the bound."""
    if panel.points is not None:
        # Many points are drawn as an image, which keeps the file of a long run small.
        many = len(panel.points[0]) > MOST_POINTS
        axis.plot(*panel.points, ".", markersize=3, alpha=0.5, rasterized=many, label="request")
    for name, (times_s, values) in panel.lines.items():
        shown = [nan if panel.is_log and value <= 0 else value for value in values]
        axis.plot(times_s, shown, linewidth=1.2, label=name or None)
    if panel.bound is not None:
        axis.axhline(panel.bound, color="tab:red", linestyle="--", label="SLO")
    if panel.is_log and panel.points is not None and any(v > 0 for v in panel.points[1]):
        axis.set_yscale("log")
        _plain(axis.yaxis)
    else:
        axis.set_ylim(bottom=0)
        axis.yaxis.get_major_locator().set_params(steps=[1, 2, 5, 10])
    axis.set(ylabel=panel.title)
    if any(panel.lines) or panel.bound is not None:
        axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.grid(alpha=0.3, which="both")


def _plain(axis: Any) -> None:
    """Labels a log axis with numbers such as 0.1, 20 and 500, if there is room."""
    from matplotlib.ticker import LogFormatter, LogLocator, NullFormatter

    class Plain(LogFormatter):
        """Labels the ticks that the base class chooses, with numbers without exponents."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    low, high = axis.get_view_interval()
    decades = log10(high / low)
    axis.set_major_formatter(Plain(labelOnlyBase=False))
    axis.set_minor_formatter(Plain(labelOnlyBase=False, minor_thresholds=(2, 0.4)))
    if decades > NARROW:
        axis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < WIDE else (1.0,)))
        axis.set_minor_formatter(NullFormatter())


def drawn_svg(draw: Callable[["Figure"], None], width: float, height: float) -> str:
    """Calls `draw` on a figure of this size in inches. Returns the drawing as an SVG element for
    HTML.

    The SVG has no background. Its text and axes have the colour of the page's text.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    bare = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    theme = {**dict.fromkeys(inked, INK), **dict.fromkeys(bare, "none"), "grid.color": GREY}
    text = io.StringIO()
    with mpl.rc_context({**theme, "svg.fonttype": "none"}):  # text stays text in the SVG
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def plot_cdfs(series_ms: Mapping[str, Sequence[float]], path: Path, *, title: str) -> None:
    """Draws a panel for each named sample, with the share of values at or below each latency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(series_ms), 3.6), layout="constrained")
    panels = figure.subplots(1, len(series_ms), squeeze=False)[0]
    for panel, (name, values_ms) in zip(panels, series_ms.items(), strict=True):
        panel.ecdf(values_ms)
        panel.set(xlabel=f"{name} (ms)", ylabel="share of values", ylim=(0, 1), xlim=(0, None))
        panel.set_title(f"n = {len(values_ms)}", fontsize="small")
        panel.grid(alpha=0.3)
    save_figure(figure, path, title=title)


def plot_bars(
    panels: Mapping[str, Mapping[str, float]],
    path: Path,
    *,
    title: str,
    limits: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Draws a panel of named bars for each quantity. A limit is a line across the bar."""
    from matplotlib.figure import Figure

    num_columns = min(len(panels), PANELS_IN_A_ROW)
    num_rows = -(-len(panels) // PANELS_IN_A_ROW)
    figure = Figure(figsize=(4.2 * num_columns, 3.6 * num_rows), layout="constrained")
    axes = [*figure.subplots(num_rows, num_columns, squeeze=False).flat]
    for unused in axes[len(panels) :]:
        unused.remove()
    for panel, (quantity, bars) in zip(axes, panels.items(), strict=False):
        panel.bar(list(bars), list(bars.values()), color="tab:blue")
        marks = (limits or {}).get(quantity, {})
        for place, name in enumerate(bars):
            if name in marks:
                panel.hlines(marks[name], place - 0.45, place + 0.45, color="black")
        panel.set_title(quantity, fontsize="small")
        panel.tick_params(axis="x", labelrotation=60, labelsize="small")
        panel.grid(axis="y", alpha=0.3)
    save_figure(figure, path, title=title)


def plot_report(report: Report, path: Path, *, title: str) -> None:
    """Draws a panel for each measured thing of a report, with a bar for each result and each
    peer.
    """
    panels: dict[str, dict[str, float]] = {}
    limits: dict[str, dict[str, float]] = {}
    for result in report.results:
        thing, _, name = result.name.partition("/")
        quantity = f"{thing}, {result.unit}" if result.unit else thing
        bars = panels.setdefault(quantity, {})
        bars[name or thing] = result.value
        bars.update({f"{name} {peer}".strip(): one.value for peer, one in result.peers.items()})
        if result.limit is not None:
            limits.setdefault(quantity, {})[name or thing] = result.limit
    where = f"{report.hardware.cpu}, commit {report.commit}"
    plot_bars(panels, path, title=f"{title}\n{where}", limits=limits)


def save_figure(figure: "Figure", path: Path, *, title: str) -> None:
    """Adds the title to a figure and writes it as PNG. Creates missing folders."""
    figure.suptitle(title, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
