"""`baton bench quality`: the loss of quality by KV and weight formats, and the KV that fits in
memory.
"""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, ClassVar, Self

import typer
from rich.console import Console

from bench.common.command import Say
from bench.common.plots import plot_bars
from bench.common.report import Report, Scalar, hardware
from bench.common.tables import print_pivot
from bench.lab.experiment import Experiment, Findings
from deploy.base.defaults import BUNDLED_MODEL
from engine.errors import ConfigError

QUICK_WINDOWS = 8
PLOTTED = ("capacity", "attention_error", "perplexity_change", "top1_agreement")


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityStudy(Experiment):
    """Measure what KV formats and weight formats cost in quality, and how much KV fits."""

    NAME: ClassVar = "quality"
    QUICK: ClassVar = f"At most {QUICK_WINDOWS} windows: under 50 s."

    checkpoint: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The model.", show_default="bundled")
    ] = BUNDLED_MODEL
    windows: Annotated[int, typer.Option(min=1, help="Pieces of text.")] = 64
    window_len: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 512
    threads: Annotated[int | None, typer.Option(min=1, show_default="all cores")] = None

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return (
            f"{self._model} model on held-out text: at most {self.windows} windows of"
            f" {self.window_len} tokens"
        )

    def quick(self) -> Self:
        """Returns a study with a few windows."""
        return replace(self, windows=min(self.windows, QUICK_WINDOWS))

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises ConfigError without torch."""
        parts = _parts()
        windows = parts.held_out_windows(
            self.checkpoint / "tokenizer.json",
            num_windows=self.windows,
            window_len=self.window_len,
            seed=self.seed,
        )
        threads = self.threads or hardware().num_cores
        found = parts.measure(self.checkpoint, windows, threads=threads, say=say)
        return Findings(found, config={"num_windows": len(windows), "num_threads": threads})

    def config(self) -> dict[str, Scalar]:
        """Returns the model and the length of a window. `measure` adds measured facts."""
        return {"checkpoint": self._model, "window_len": self.window_len}

    def show(self, console: Console, report: Report) -> None:
        """Prints the results with a row for each setting."""
        print_pivot(console, report)

    def plot(self, report: Report, found: Findings, path: Path) -> None:
        """Draws a panel for each measured thing, with a bar for each setting."""
        panels: dict[str, dict[str, float]] = {}
        for result in report.results:
            thing, _, setting = result.name.partition("/")
            if thing in PLOTTED:
                bars = panels.setdefault(f"{thing.replace('_', ' ')}, {result.unit}", {})
                bars[setting.replace("_", " ")] = result.value
        title = f"{self.title}\n{report.hardware.cpu}, commit {report.commit}"
        plot_bars(panels, path, title=title)

    @property
    def _model(self) -> str:
        return "bundled" if self.checkpoint == BUNDLED_MODEL else str(self.checkpoint)


def _parts() -> ModuleType:
    """Imports `bench.quality.run`, which needs torch. Raises ConfigError if torch is missing."""
    try:
        return importlib.import_module("bench.quality.run")
    except ImportError as error:
        message = f"{error.name} is not installed: pip install 'baton-serve[worker]'"
        raise ConfigError(message) from error
