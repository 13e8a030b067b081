"""Plots as PNG files or SVG texts.

matplotlib is optional (`pip install baton-serve[bench]`), and imported late.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from math import log10, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.report import Report
from bench.common.series import TimePanel
from engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_IN_A_ROW = 3
PANEL_INCHES = 2.2  # height of a panel over time
MOST_POINTS = 2000  # most points that one panel draws individually
NARROW, WIDE = 0.8, 2.5  # numbers of decades at which a log axis counts as narrow or wide
INK = "#010203"  # placeholder for the colour of the text around an SVG
GREY = "#888888"  # visible on light and on dark pages


def require_matplotlib(option: str = "--plot") -> None:
    """Raises ConfigError if matplotlib is missing: called before a run, not after it."""
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
    """Draws distributions of latencies, and below them the load over time."""
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
    """Draws the share of values at or below each latency, on a log axis, with its bound."""
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
    """Draws panels below each other, on one axis of time."""
    if not panels:
        return
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_over_time(axis, panel)
    axes[-1].set(xlabel="time (s)", xlim=(0, None))


def _draw_over_time(axis: Any, panel: TimePanel) -> None:
    """Draws one panel over time: points, lines and the bound."""
    if panel.points is not None:
        # Points are drawn as an image, which keeps the file of a long run small.
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
    """Labels a log axis with plain numbers such as 0.1, 20 and 500, as far as there is room."""
    from matplotlib.ticker import LogFormatter, LogLocator, NullFormatter

    class Plain(LogFormatter):
        """Labels the same ticks as its base class, with plain numbers."""

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
    """Returns what `draw` draws, on a figure of this size in inches, as an SVG element for HTML.

    It has no background, and its text and axes have the colour of the text around it.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    bare = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    theme = {**dict.fromkeys(inked, INK), **dict.fromkeys(bare, "none"), "grid.color": GREY}
    text = io.StringIO()
    with mpl.rc_context({**theme, "svg.fonttype": "none"}):  # text is kept as text
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def plot_cdfs(series_ms: Mapping[str, Sequence[float]], path: Path, *, title: str) -> None:
    """Draws a panel for each named sample: the share of values at or below each latency."""
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
    """Draws a panel of named bars for each quantity. A limit is a line across its bar."""
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
    """Draws a panel for each measured thing of a report: a bar for each result and each peer."""
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
    """Adds the title to a figure and writes it as PNG; makes missing folders."""
    figure.suptitle(title, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
