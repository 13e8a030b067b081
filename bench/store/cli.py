"""`baton bench store`: its options, and what is printed, written and plotted."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
from bench.common.plots import require_matplotlib
from bench.common.progress import say_on_stderr
from bench.common.report import Report, notes_on
from bench.common.shapes import SHAPES
from bench.common.tables import print_results
from bench.store.plan import StorePart, StorePlan, check, config_of, quick
from bench.store.plots import plot_store
from bench.store.results import GOALS, results, warnings
from bench.store.run import measure

BY_DEFAULT = ",".join(StorePart)


def store(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    parts: Annotated[
        str, typer.Option(help=f"What to measure, of {BY_DEFAULT}, between commas.")
    ] = BY_DEFAULT,
    disk: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure; else a temporary one.")
    ] = None,
    shape: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "88m",
    prompt_len: Annotated[int, typer.Option(help="Tokens of a prompt whose TTFT counts.")] = 2048,
    prompts: Annotated[int, typer.Option(min=1, help="How many of these prompts.")] = 5,
    recovered: Annotated[int, typer.Option(min=1, help="Blocks that a start finds.")] = 1_000_000,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    quick_: Annotated[
        bool, quick_option("Short prompts; neither streams nor turns: under 50 s.")
    ] = False,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure what a KV store saves after restarts, its limits, and its cost to running streams.

    Exits with status 1 if a part could not be measured.
    """
    with printed_errors():
        plan = StorePlan(
            disk=disk or Path(tempfile.gettempdir()),
            parts=values_of("--parts", parts, StorePart, f"a list of {BY_DEFAULT}"),
            shape=shape,
            prompt_len=prompt_len,
            num_prompts=prompts,
            num_repeats=repeat,
            num_recovered=recovered,
            seed=seed,
        )
        plan = check(quick(plan) if quick_ else plan)
        if plot:
            require_matplotlib()
        measured = measure(plan, say_on_stderr())
        found = results(plan, measured)
        report = report_here(
            "store",
            seed=seed,
            config=config_of(plan) | notes_on({}, measured.missing),
            results=found,
        )
        if measured.disk is not None:
            report = replace(report, config={**report.config, "disk_engines": measured.disk.facts})
        publish(report, json, title=_title(plan), show=_show, warnings=warnings(measured, found))
        if plot:
            plot_store(report, plot, title=_title(plan))
    if measured.missing:
        raise typer.Exit(1)


def _show(console: Console, report: Report) -> None:
    print_results(console, report, GOALS)


def _title(plan: StorePlan) -> str:
    return (
        f"KV store of {plan.store_mib} MiB, prompts of {plan.prompt_len} tokens, shape"
        f" {plan.shape}, blocks of {plan.block_bytes // 1024} KiB"
    )
