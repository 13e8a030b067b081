"""`baton bench speculate`: its options, and what is printed, written and plotted."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.common.driven import DrivenFailed
from bench.common.machine import commit, hardware
from bench.common.plots import plot_bars, require_matplotlib
from bench.common.report import Report, write_json
from bench.common.shapes import SHAPES
from bench.common.tables import print_warnings
from bench.speculate.plan import BATCHES, SETUPS, SpeculatePlan, check, config_of, quick
from bench.speculate.results import Measured, results, warnings
from bench.speculate.run import measure
from bench.speculate.tables import print_speculation
from engine.config import WeightFormat
from engine.errors import BatonError, ConfigError


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
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer that is timed.")] = 64,
    identity: Annotated[
        int, typer.Option(min=0, help="Requests whose answers are compared between modes.")
    ] = 200,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; results are their medians.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and noise.")] = 0,
    quick_: Annotated[
        bool, typer.Option("--quick", help="One run of shorter answers: under 50 s.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write speed-ups and acceptance here.")] = None,
) -> None:
    """Measure what speculation gains and costs, and that it changes no token."""
    console = Console()
    log = Console(stderr=True)
    try:
        plan = SpeculatePlan(
            shape=shape,
            setups=tuple(dict.fromkeys(name for name in setups.split(",") if name)),
            weights=weights,
            num_threads=threads or hardware().num_cores,
            batches=_numbers("--batches", batches),
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
        measured = measure(plan, say=lambda line: log.print(line, style="dim"))
        report = _report(plan, measured)
        if json:
            write_json(report, json)
        if plot:
            _plot(report, plot, title=_title(plan))
        print_speculation(console, report, title=_title(plan))
        print_warnings(console, warnings(measured))
    except DrivenFailed as error:
        typer.echo(f"error: {error}\n" + "\n".join(error.last_lines), err=True)
        raise typer.Exit(1) from error
    except (BatonError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",") if number))
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is not a list of numbers") from error


def _report(plan: SpeculatePlan, measured: Measured) -> Report:
    return Report(
        bench="speculate",
        commit=commit(),
        hardware=hardware(),
        seed=plan.seed,
        config=config_of(plan),
        results=results(plan, measured),
    )


def _title(plan: SpeculatePlan) -> str:
    runs = "once" if plan.num_repeats == 1 else f"{plan.num_repeats} times"
    return f"speculation with {plan.weights} weights: {plan.num_threads} threads, each cell {runs}"


def _plot(report: Report, path: Path, *, title: str) -> None:
    """Speed-ups with what was predicted, and acceptance by place with what was expected."""
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
    title = f"{title}; lines are what is expected\n{where}"
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
