"""The command `baton bench chaos`: its options and its report."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from bench.chaos.plan import OF_RAY, ChaosPlan, FaultKind, check, config_of, quick
from bench.chaos.results import complaints, has_passed, results, row_of, story
from bench.chaos.run import measure
from bench.common.command import (
    JsonOption,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
    values_of,
)
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.report import results_of
from bench.common.tables import print_lines

SPECIAL = {FaultKind.PARTITION, FaultKind.DISK_FULL, FaultKind.EVERYTHING, *OF_RAY}
BY_DEFAULT = ",".join(kind for kind in FaultKind if kind not in SPECIAL)


def chaos(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 1000,
    rate: Annotated[float, typer.Option(help="Requests/s, kept up during faults.")] = 4.0,
    kill_every: Annotated[float, typer.Option(help="Seconds between kills.")] = 5.0,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    gateways: Annotated[int, typer.Option(min=1, help="Gateway processes.")] = 2,
    spares: Annotated[int, typer.Option(min=0, help="Workers that wait to take a place.")] = 0,
    store_mib: Annotated[
        int, typer.Option(min=0, help="MiB of a store's memory; 0: there is no store.")
    ] = 64,
    faults: Annotated[
        str,
        typer.Option(
            help=f"Kinds, of {', '.join(FaultKind)}, between commas. A partition needs root and"
            " iproute2: each worker is in a network namespace of its own. gcs, raylet need Ray."
        ),
    ] = BY_DEFAULT,
    seed: SeedOption = 0,
    each: Annotated[
        bool, typer.Option("--each", help="One kind after the other, each in a new deployment.")
    ] = False,
    quick_: Annotated[bool, quick_option("60 requests: under 50 s.")] = False,
    json: JsonOption = None,
) -> None:
    """Kill, stop, slow down and cut off services under load; exit 1 if a request or a block is
    lost, or if a planned kind of fault did not happen.
    """
    with printed_errors():
        plan = ChaosPlan(
            num_requests=requests,
            rate_per_s=rate,
            every_s=kill_every,
            prefill=prefill,
            decode=decode,
            gateways=gateways,
            spares=spares,
            store_mib=store_mib,
            kinds=values_of("--faults", faults, FaultKind, f"a list of {', '.join(FaultKind)}"),
            seed=seed,
        )
        plan = quick(plan) if quick_ else plan
        plans = [replace(plan, kinds=(kind,)) for kind in plan.kinds] if each else [plan]
        for one in plans:
            check(one)
        runs = [measure(one, say_on_stderr()) for one in plans]
        report = report_here(
            _report_name(plan) if each else "chaos",
            seed=seed,
            config=config_of(plan),
            results=results_of([row_of(run) for run in runs]) if each else results(runs[0]),
        )
        title = (
            f"{plan.num_requests} requests at {plan.rate_per_s:g}/s, {plan.prefill} + {plan.decode}"
            f" workers, a fault of {config_of(plan)['faults']} every {plan.every_s:g} s"
        )
        publish(report, json, title=title)
    for run in runs:
        print_lines(Console(), story(run))
        print_lines(Console(), complaints(run), style="red")
    if not has_passed(report.results):
        raise typer.Exit(1)


def _report_name(plan: ChaosPlan) -> str:
    """Returns the report's name: a run with a single kind of fault has a report of its own."""
    return "faults" if len(plan.kinds) > 1 else str(plan.kinds[0])
