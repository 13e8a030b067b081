"""`baton bench validation`: its options, and what is printed, drawn and written.

baton bench validation --json validation.json --plot validation.png
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.common.command import (
    JsonOption,
    PlotOption,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
    splits_of,
)
from bench.common.machine import report_here
from bench.common.plots import plot_cdfs, require_matplotlib
from bench.common.progress import say_on_stderr
from bench.common.report import Scalar
from bench.common.tables import print_results
from bench.simulator.hardware import write_hardware
from bench.validation.plan import QUICK_REQUESTS, ValidationPlan
from bench.validation.results import GOALS, SplitComparison, results_of
from bench.validation.run import measure

DEFAULTS = ValidationPlan()


def validation(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    splits: Annotated[
        str, typer.Option(metavar="P+D,…", help="Deployments: prefill and decode workers.")
    ] = "1+1,2+2",
    rate: Annotated[
        float, typer.Option(min=0.1, help="Requests/s to one prefill worker.")
    ] = DEFAULTS.rate_per_s,
    requests: Annotated[
        int, typer.Option(min=10, help="Requests of the trace.")
    ] = DEFAULTS.num_requests,
    calibrating: Annotated[
        int, typer.Option(min=10, help="Requests that each calibration takes.")
    ] = DEFAULTS.num_calibrating,
    repeat: Annotated[
        int, typer.Option(min=1, help="Calibrations and measurements, in turns.")
    ] = DEFAULTS.num_repeats,
    quick: Annotated[
        bool, quick_option("Less than a minute: one short run of each split.")
    ] = False,
    seed: SeedOption = 0,
    record: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep recordings and profiles here.")
    ] = None,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Play one trace on real deployments and in the simulator, and say how far they differ."""
    with printed_errors():
        if plot:
            require_matplotlib()
        if quick:
            requests, calibrating, repeat = QUICK_REQUESTS, QUICK_REQUESTS, 1
        plan = ValidationPlan(splits_of(splits), rate, requests, calibrating, repeat, seed)
        with tempfile.TemporaryDirectory(prefix="baton-") as scratch:
            folder = record or Path(scratch)
            compared = measure(plan, folder, say_on_stderr())
        if record:
            for one in compared:
                write_hardware(one.fitted.hardware, record / f"{one.name}.hardware.json")
        report = report_here(
            "validation",
            seed=plan.seed,
            config=_config(plan, compared),
            results=[result for one in compared for result in results_of(one)],
        )
        title = f"{plan.num_requests} requests, {plan.num_repeats} times, and simulated"
        publish(report, json, title=title, show=partial(print_results, goals=GOALS))
        if plot:
            plot_cdfs(_series_ms(compared), plot, title=title)


def _config(plan: ValidationPlan, compared: Sequence[SplitComparison]) -> dict[str, Scalar]:
    config: dict[str, Scalar] = {
        "requests": plan.num_requests,
        "calibrating": plan.num_calibrating,
        "repeats": plan.num_repeats,
        "rate_per_s": plan.rate_per_s,
    }
    for one in compared:
        fitted = one.fitted
        parts = {
            "latency_s": fitted.latency_s,
            "gateway_load": fitted.hardware.gateway_load,
        }
        for part in ("prefill", "decode", "pull"):
            cost = getattr(fitted.hardware, part)
            parts |= {f"{part}.{name}": getattr(cost, name) for name in cost.__slots__}
        config |= {f"{one.name}/{name}": value for name, value in parts.items()}
    return config


def _series_ms(compared: Sequence[SplitComparison]) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {}
    for one in compared:
        for name in ("ttft", "tpot"):
            measured = [value * 1000 for samples in one.measured for value in samples[name]]
            title = f"{one.name} {name.upper()}"
            series[f"{title} measured"] = measured
            guessed = [value * 1000 for samples in one.simulated for value in samples[name]]
            series[f"{title} simulated"] = guessed
    return series
