"""`baton bench router`: its options, and what is printed, written and plotted."""

from functools import partial
from typing import Annotated

import typer

from bench.common.command import (
    JsonOption,
    PlotOption,
    RepeatOption,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
    values_of,
)
from bench.common.machine import report_here
from bench.common.plots import plot_bars, require_matplotlib
from bench.common.progress import say_on_stderr
from bench.common.report import Report
from bench.common.tables import print_results
from bench.router.plan import (
    FULL_CASES,
    GOALS,
    QUICK_CASES,
    RouterCase,
    RouterPlan,
    check,
    config_of,
)
from bench.router.results import PEER, results, warnings
from bench.router.run import measure, measure_ingest


def router(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    cases: Annotated[
        str | None,
        typer.Option(metavar="WORKERS:BLOCKS,…", help="What to measure.", show_default="10 … 10⁴"),
    ] = None,
    decisions: Annotated[int, typer.Option(min=100, help="Decisions of one run.")] = 20_000,
    repeat: RepeatOption = 7,
    seed: SeedOption = 0,
    quick: Annotated[bool, quick_option("Three cases, shorter runs: under 50 s.")] = False,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure how many placements a router decides in a second, and how long each takes."""
    with printed_errors():
        plan = check(
            RouterPlan(
                cases=_cases(cases) if cases else QUICK_CASES if quick else FULL_CASES,
                num_repeats=min(repeat, 5) if quick else repeat,
                num_decisions=min(decisions, 5_000) if quick else decisions,
                seed=seed,
            )
        )
        if plot:
            require_matplotlib()
        measured = measure(plan, say_on_stderr())
        report = report_here(
            "router",
            seed=plan.seed,
            config=config_of(plan),
            results=results(measured, measure_ingest(plan)),
        )
        show = partial(print_results, goals=GOALS)
        publish(report, json, title=_title(plan), show=show, warnings=warnings(measured))
        if plot:
            plot_bars(panels(report), plot, title=_title(plan))


def panels(report: Report) -> dict[str, dict[str, float]]:
    """Bars of the plot: ours and the peer's decisions/s and p99."""
    found: dict[str, dict[str, float]] = {}
    for thing in ("decisions", "latency_p99"):
        chosen = [result for result in report.results if result.name.startswith(f"{thing}/")]
        unit = chosen[0].unit
        found[f"{thing}, {unit}"] = {r.name.partition("/")[2]: r.value for r in chosen}
        found[f"{thing} of {PEER}, {unit}"] = {
            r.name.partition("/")[2]: r.peers[PEER].value for r in chosen if r.peers
        }
    return found


def _cases(text: str) -> tuple[RouterCase, ...]:
    return values_of("--cases", text, _case, "WORKERS:BLOCKS,…")


def _case(text: str) -> RouterCase:
    workers, blocks = text.split(":")
    return RouterCase(int(workers), int(blocks))


def _title(plan: RouterPlan) -> str:
    return f"Placements on one core: {plan.num_repeats} × {plan.num_decisions} decisions a case"
