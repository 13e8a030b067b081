"""`baton bench speculate`: its options, and what is printed, written and plotted."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.common.command import (
    JsonOption,
    PlotOption,
    RepeatOption,
    SeedOption,
    numbers_of,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import hardware, report_here
from bench.common.plots import plot_bars, require_matplotlib
from bench.common.progress import say_on_stderr
from bench.common.report import Report
from bench.common.shapes import SHAPES
from bench.common.tables import print_pivot, print_results
from bench.speculate.plan import BATCHES, SETUPS, SpeculatePlan, check, config_of, quick
from bench.speculate.results import results, warnings
from bench.speculate.run import measure
from engine.config import WeightFormat
from engine.errors import ConfigError


def speculate(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    setups: Annotated[str, typer.Option(help="Which pairs of models to measure.")] = (
        ",".join(SETUPS)
    ),
    shape: Annotated[
        str, typer.Option(help=f"Random weights that draft for themselves: {', '.join(SHAPES)}.")
    ] = "88m",
    weights: Annotated[WeightFormat, typer.Option(help="fp32, bf16 or int8.")] = WeightFormat.INT8,
    threads: Annotated[int | None, typer.Option(min=1, show_default="all cores")] = None,
    batches: Annotated[str, typer.Option(help="Sequences at once.")] = ",".join(map(str, BATCHES)),
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer that is timed.")] = 64,
    identity: Annotated[
        int, typer.Option(min=0, help="Requests whose answers are compared between modes.")
    ] = 200,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("One run of shorter answers: under 50 s.")] = False,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure what speculation gains and costs, and that it changes no token."""
    with printed_errors():
        plan = SpeculatePlan(
            shape=shape,
            setups=tuple(dict.fromkeys(name for name in setups.split(",") if name)),
            weights=weights,
            num_threads=threads or hardware().num_cores,
            batches=numbers_of("--batches", batches),
            num_tokens=tokens,
            num_identity=identity,
            num_repeats=repeat,
            seed=seed,
        )
        plan = check(quick(plan) if quick_ else plan)
        if plot:
            require_matplotlib()
        if find_spec("torch") is None:
            raise ConfigError("torch is not installed: pip install 'baton-serve[worker]'")
        measured = measure(plan, say=say_on_stderr())
        report = report_here(
            "speculate",
            seed=plan.seed,
            config=config_of(plan),
            results=results(plan, measured),
        )
        publish(report, json, title=_title(plan), show=_show, warnings=warnings(measured))
        if plot:
            _plot(report, plot, title=_title(plan))


def _show(console: Console, report: Report) -> None:
    """Prints what is promised, then grids of the medians of all cells and of all places."""
    cells = [result for result in report.results if result.name.count("/") == 2]
    places = [r for r in report.results if "acceptance/" in r.name and r not in cells]
    others = [r for r in report.results if r not in cells and r not in places]
    print_results(console, replace(report, results=tuple(others)))
    for grid in filter(None, (cells, places)):
        medians = tuple(replace(result, runs=(result.value,)) for result in grid)
        print_pivot(console, replace(report, results=medians))


def _title(plan: SpeculatePlan) -> str:
    runs = "once" if plan.num_repeats == 1 else f"{plan.num_repeats} times"
    return f"speculation with {plan.weights} weights: {plan.num_threads} threads, each cell {runs}"


def _plot(report: Report, path: Path, *, title: str) -> None:
    """Plots speed-ups beside predictions, and acceptance by place beside expectations."""
    panels: dict[str, dict[str, float]] = {}
    limits: dict[str, dict[str, float]] = {}
    values = {result.name: result.value for result in report.results}
    for name, value in values.items():
        thing, _, rest = name.partition("/")
        if thing == "speedup" and f"predicted/{rest}" in values:
            cell, _, bar = rest.partition("/")
            _add(panels, limits, f"{cell}, speed-up", bar, value, values[f"predicted/{rest}"])
        elif thing == "acceptance":
            drafter, _, bar = rest.rpartition("_")
            expected = values[f"expected_{name}"]
            _add(panels, limits, f"{drafter}, accepted", bar, value, expected)
    where = f"{report.hardware.cpu}, commit {report.commit}"
    title = f"{title}; lines are expectations\n{where}"
    plot_bars(panels, path, title=title, limits=limits)


def _add(
    panels: dict[str, dict[str, float]],
    limits: dict[str, dict[str, float]],
    panel: str,
    bar: str,
    value: float,
    expected: float,
) -> None:
    panels.setdefault(panel, {})[bar] = value
    limits.setdefault(panel, {})[bar] = expected
