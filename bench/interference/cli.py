"""`baton bench interference`: its options, and what is printed and written."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bench.client.load import kinds_with_example
from bench.common.command import (
    JsonOption,
    RepeatOption,
    SeedOption,
    printed_errors,
    quick_option,
    save,
)
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.report import Report, Result
from bench.common.shapes import SHAPES
from bench.common.tables import print_failures, print_pivot, print_warnings
from bench.interference.plan import InterferencePlan, InterferenceRequests, check, config_of, quick
from bench.interference.results import InterferenceRun, promises, results, warnings
from bench.interference.run import measure


def interference(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    shape: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "88m",
    streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 4,
    stream_input: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 64,
    stream_output: Annotated[int, typer.Option(min=8, help="Output tokens of each.")] = 320,
    load_at_once: Annotated[int, typer.Option(min=1, help="Loading prompts under way.")] = 1,
    load_input: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 1024,
    load_output: Annotated[int, typer.Option(min=1, help="Tokens that each is answered by.")] = 1,
    repeat: RepeatOption = 5,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("Once, with short streams.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure how much long prompts hold up running streams, prefill apart from decode or not."""
    with printed_errors():
        plan = check(
            InterferencePlan(
                shape,
                streams=InterferenceRequests(streams, stream_input, stream_output),
                load=InterferenceRequests(load_at_once, load_input, load_output),
                num_repeats=repeat,
                seed=seed,
            )
        )
        plan = quick(plan) if quick_ else plan
        runs = measure(plan, say_on_stderr())
        report = _report(plan, runs)
        save(report, json)
        _print(Console(), plan, report, runs)


def _report(plan: InterferencePlan, runs: list[InterferenceRun]) -> Report:
    return report_here(
        "interference",
        seed=plan.seed,
        config=config_of(plan),
        results=results(runs),
    )


def _shown(found: Sequence[Result]) -> tuple[Result, ...]:
    """Results that fit a terminal: the spread of the p99s, and the medians of the others."""
    return tuple(
        result if result.name.startswith("itl_p99/") else replace(result, runs=(result.value,))
        for result in found
        if not result.name.startswith("cpu_others/")
    )


def _print(
    console: Console, plan: InterferencePlan, report: Report, runs: list[InterferenceRun]
) -> None:
    streams, load = plan.streams, plan.load
    title = (
        f"{streams.at_once} streams of {plan.shape}, two workers of one thread,"
        f" prompts of {load.input_len} tokens back to back: {plan.num_repeats} ×"
    )
    print_pivot(console, replace(report, results=_shown(report.results)), title=title)
    for line in promises(report.results):
        console.print(Text(line), soft_wrap=True)
    print_failures(console, kinds_with_example(f for run in runs for f in run.failures))
    print_warnings(console, warnings(runs))
