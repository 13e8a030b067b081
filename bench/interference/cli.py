"""`baton bench interference`: its options, and what is printed and written."""

from typing import Annotated

import typer
from rich.console import Console

from bench.common.command import (
    JsonOption,
    RepeatOption,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.shapes import SHAPES
from bench.common.tables import print_lines
from bench.interference.plan import InterferencePlan, InterferenceRequests, check, config_of, quick
from bench.interference.results import promises, results, warnings
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
        found = results(runs)
        report = report_here("interference", seed=plan.seed, config=config_of(plan), results=found)
        title = (
            f"{streams} streams of {shape}, two workers of one thread,"
            f" prompts of {load_input} tokens back to back: {plan.num_repeats} ×"
        )
        publish(report, json, title=title, warnings=warnings(runs))
        print_lines(Console(), promises(found))
