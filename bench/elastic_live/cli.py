"""The command `baton bench elastic-live`: its options and its table."""

from typing import Annotated

import typer

from bench.client.load import kinds_of
from bench.common.command import JsonOption, SeedOption, printed_errors, publish, quick_option
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.shapes import SHAPES
from bench.elastic_live.plan import LivePlan, config_of, quick
from bench.elastic_live.results import results
from bench.elastic_live.run import measure


def elastic_live(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    shape: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "88m",
    workers: Annotated[int, typer.Option(min=2, help="Workers of one thread each.")] = 3,
    phases: Annotated[
        int, typer.Option(min=2, help="Phases, which alternate between reading and writing.")
    ] = 4,
    phase_s: Annotated[float, typer.Option(min=2.0, help="Length of a phase in seconds.")] = 20.0,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each; results are medians.")] = 3,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("One run of two phases, against the even split.")] = False,
    json: JsonOption = None,
) -> None:
    """Play an alternating load on a real deployment, with fixed splits and with the planner."""
    with printed_errors():
        plan = LivePlan(
            shape,
            workers,
            splits=range(1, workers),
            num_phases=phases,
            phase_s=phase_s,
            num_repeats=repeat,
            seed=seed,
        )
        plan = quick(plan) if quick_ else plan
        pace, runs = measure(plan, say_on_stderr())
        report = report_here(
            "elastic-live",
            seed=seed,
            config=config_of(plan, pace),
            results=results(plan, pace, runs),
        )
        title = f"a load that changes every {plan.phase_s:g} s, {workers} workers of {shape}"
        failures = kinds_of([failure for run in runs for failure in run.load.failures])
        publish(report, json, title=title, warnings=[f"failed: {kind}" for kind in failures])
