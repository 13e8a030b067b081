"""The command `baton bench hostile`: its options and its report."""

from typing import Annotated

import typer
from rich.console import Console

from bench.common.command import JsonOption, SeedOption, printed_errors, publish, quick_option
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.tables import print_lines
from bench.hostile.assaults import ASSAULTS
from bench.hostile.plan import HostilePlan, check, config_of, quick
from bench.hostile.results import complaints, results, warnings
from bench.hostile.run import measure
from engine.errors import ConfigError


def hostile(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    bodies: Annotated[int, typer.Option(min=1, help="Hostile requests.")] = 50_000,
    slow: Annotated[int, typer.Option(min=1, help="Slow connections at once.")] = 2_000,
    disconnects: Annotated[int, typer.Option(min=1, help="Clients that leave.")] = 10_000,
    streams: Annotated[int, typer.Option(min=1, help="Honest streams beside them.")] = 4,
    at_once: Annotated[int, typer.Option(min=1, help="Hostile requests under way.")] = 16,
    assault: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(ASSAULTS)}; may be given again. All by default."),
    ] = None,
    times: Annotated[int, typer.Option(min=1, help="That each assault is carried out.")] = 4,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("A small part of each wave.")] = False,
    json: JsonOption = None,
) -> None:
    """Send hostile requests, slow connections, disconnects and assaults beside honest streams;
    exit 1 if a server error, a leak, a lost service, a long pause or growing memory shows.
    """
    with printed_errors():
        assaults = tuple(assault or ASSAULTS)
        if unknown := next((name for name in assaults if name not in ASSAULTS), None):
            raise ConfigError(f"there is no assault {unknown!r}; there are {', '.join(ASSAULTS)}")
        plan = HostilePlan(
            bodies, slow, disconnects, streams, at_once, seed, assaults=assaults, times=times
        )
        plan = check(plan)
        plan = quick(plan) if quick_ else plan
        run = measure(plan, say_on_stderr())
        report = report_here("hostile", seed=seed, config=config_of(plan), results=results(run))
        title = (
            f"{plan.num_bodies} hostile requests, {plan.num_slow} slow connections and"
            f" {plan.num_disconnects} disconnects beside {plan.num_streams} streams"
        )
        publish(report, json, title=title, warnings=warnings(run))
    found = complaints(run)
    print_lines(Console(), found, style="red")
    if found:
        raise typer.Exit(1)
