"""The command `baton bench starts`: its options and its report."""

from typing import Annotated

import typer

from bench.common.command import JsonOption, RepeatOption, printed_errors, publish, quick_option
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.report import results_of
from bench.starts.plan import LAUNCHERS, StartsPlan, check, config_of
from bench.starts.run import measure


def starts(
    *,
    launchers: Annotated[str, typer.Option(help="Launchers to start.")] = ",".join(LAUNCHERS),
    repeat: RepeatOption = 5,
    quick_: Annotated[bool, quick_option("One round, in which nothing is compiled.")] = False,
    json: JsonOption = None,
) -> None:
    """Start `baton serve` with the bundled model, and measure when it is ready."""
    with printed_errors():
        names = tuple(launchers.split(","))
        plan = check(StartsPlan(names, 1 if quick_ else repeat, has_first=not quick_))
        found = results_of(measure(plan, say_on_stderr()))
        report = report_here("starts", seed=0, config=dict(config_of(plan)), results=found)
        publish(report, json, title=f"starts of baton serve, {plan.num_repeats} rounds")
