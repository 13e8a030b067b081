"""The plot of `bench store`: TTFT by where a prefix came from, and bandwidths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.plots import save_figure
from bench.common.report import Report, Result

TTFT = ("ttft/cold", "ttft/disk", "ttft/memory", "ttft/worker")


def plot_store(report: Report, path: Path, *, title: str) -> None:
    """Writes the figure as PNG. Results that were not measured are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_name = {result.name: result for result in report.results}
    _draw(left, [by_name[name] for name in TTFT if name in by_name], "ms, log scale")
    left.set_title("time to first token", fontsize="small")
    left.set_yscale("log")
    _draw(right, [one for one in report.results if one.unit == "GiB/s"], "GiB/s")
    right.set_title("blocks from memory and disk", fontsize="small")
    title = f"{title}\n{report.hardware.cpu}, commit {report.commit}"
    save_figure(figure, path, title=title)


def _draw(panel: Any, results: Sequence[Result], unit: str) -> None:
    """Draws a bar for each result, from the least to the greatest of its runs."""
    places = range(len(results))
    panel.bar(places, [one.value for one in results], width=0.6)
    for place, one in zip(places, results, strict=True):
        panel.plot([place, place], [min(one.runs), max(one.runs)], color="black", linewidth=1)
    names = [one.name.partition("/")[2] or one.name for one in results]
    panel.set_xticks(places, names, rotation=60, ha="right", fontsize="small")
    panel.set(ylabel=unit)
    panel.grid(axis="y", alpha=0.3)
