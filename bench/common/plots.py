"""Plots as PNG files. matplotlib is optional (`pip install baton-serve[bench]`), imported late."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_IN_A_ROW = 3


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is missing: called before a run, not after it."""
    try:
        import matplotlib  # noqa: F401 (looked for, not used)
    except ImportError as error:
        message = "--plot needs matplotlib: pip install 'baton-serve[bench]'"
        raise ConfigError(message) from error


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


def save_figure(figure: "Figure", path: Path, *, title: str) -> None:
    """Writes a figure under its title as PNG; makes its folders."""
    figure.suptitle(title, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
