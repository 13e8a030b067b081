"""`baton bench quality`: its options and its report."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from bench.common.command import (
    JsonOption,
    PlotOption,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import hardware, report_here
from bench.common.plots import plot_bars, require_matplotlib
from bench.common.progress import say_on_stderr
from bench.common.report import Report
from bench.common.tables import print_pivot
from deploy.base.defaults import BUNDLED_MODEL
from engine.errors import ConfigError

QUICK_WINDOWS = 8
PLOTTED = ("capacity", "attention_error", "perplexity_change", "top1_agreement")


def quality(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    checkpoint: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The model.", show_default="bundled")
    ] = BUNDLED_MODEL,
    num_windows: Annotated[int, typer.Option("--windows", min=1, help="Pieces of text.")] = 64,
    window_len: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 512,
    threads: Annotated[int | None, typer.Option(min=1, show_default="all cores")] = None,
    seed: SeedOption = 0,
    quick: Annotated[bool, quick_option(f"At most {QUICK_WINDOWS} windows: under 50 s.")] = False,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure what KV formats and weight formats cost in quality, and how much KV fits."""
    threads = threads or hardware().num_cores
    num_windows = min(num_windows, QUICK_WINDOWS) if quick else num_windows
    with printed_errors():
        if plot:
            require_matplotlib()
        parts = _parts()
        windows = parts.held_out_windows(
            checkpoint / "tokenizer.json", num_windows=num_windows, window_len=window_len, seed=seed
        )
        report = report_here(
            "quality",
            seed=seed,
            config={
                "checkpoint": "bundled" if checkpoint == BUNDLED_MODEL else str(checkpoint),
                "num_windows": len(windows),
                "window_len": window_len,
                "num_threads": threads,
            },
            results=parts.measure(checkpoint, windows, threads=threads, say=say_on_stderr()),
        )
        publish(report, json, title=_title(report), show=print_pivot)
        if plot:
            _plot(report, plot)


def _parts() -> ModuleType:
    """Imports `bench.quality.run`, which needs torch. Raises ConfigError if torch is missing."""
    try:
        return importlib.import_module("bench.quality.run")
    except ImportError as error:
        message = f"{error.name} is not installed: pip install 'baton-serve[worker]'"
        raise ConfigError(message) from error


def _title(report: Report) -> str:
    config = report.config
    return (
        f"{config['checkpoint']} model on held-out text:"
        f" {config['num_windows']} windows of {config['window_len']} tokens"
    )


def _plot(report: Report, path: Path) -> None:
    panels: dict[str, dict[str, float]] = {}
    for result in report.results:
        thing, _, setting = result.name.partition("/")
        if thing in PLOTTED:
            bars = panels.setdefault(f"{thing.replace('_', ' ')}, {result.unit}", {})
            bars[setting.replace("_", " ")] = result.value
    plot_bars(
        panels, path, title=f"{_title(report)}\n{report.hardware.cpu}, commit {report.commit}"
    )
