"""The command `baton bench batches`: its options and its table."""

from typing import Annotated

import typer

from bench.batches.plan import BesidePlan, config_of, quick
from bench.batches.results import results, warnings
from bench.batches.run import measure
from bench.common.command import JsonOption, SeedOption, printed_errors, publish, quick_option
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr


def batches(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    requests: Annotated[int, typer.Option(min=1, help="Requests of batches.")] = 10_000,
    pairs: Annotated[int, typer.Option(min=1, help="Windows with and without a batch.")] = 10,
    window_s: Annotated[float, typer.Option(min=1.0, help="Length of a window.")] = 20.0,
    rate: Annotated[float, typer.Option(min=0.01, help="Clients' requests per second.")] = 4.0,
    kills: Annotated[
        int, typer.Option(min=0, help="Kills of every process during a second batch; 0: none.")
    ] = 0,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("Few requests and one short pair of windows.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure what batches cost clients, and whether kills lose or repeat a result."""
    with printed_errors():
        plan = BesidePlan(
            num_requests=requests,
            num_pairs=pairs,
            window_s=window_s,
            rate_per_s=rate,
            num_kills=kills,
            seed=seed,
        )
        plan = quick(plan) if quick_ else plan
        measured = measure(plan, say_on_stderr())
        report = report_here(
            "batches", seed=seed, config=config_of(plan), results=results(plan, measured)
        )
        title = f"clients beside {plan.num_requests:,} requests of batches"
        publish(report, json, title=title, warnings=warnings(plan, measured))
