"""The command `baton bench moves`: its options and its report."""

from typing import Annotated

import typer

from bench.common.command import JsonOption, SeedOption, printed_errors, publish, quick_option
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.shapes import SHAPES
from bench.lab.streams import StreamAsk
from bench.moves.join_run import measure_joins
from bench.moves.joining import join_results
from bench.moves.plan import MovesPlan, check, config_of, quick
from bench.moves.results import results
from bench.moves.run import measure


def moves(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    shape: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "88m",
    streams: Annotated[int, typer.Option(min=1, help="Streams that move at once.")] = 16,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 256,
    output_len: Annotated[int, typer.Option(min=8, help="Output tokens of each.")] = 256,
    beside: Annotated[int, typer.Option(min=0, help="Streams that run where those go.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Flips; results are their medians.")] = 6,
    seed: SeedOption = 0,
    join: Annotated[
        bool, typer.Option(help="Start a decode worker beside a full one instead.")
    ] = False,
    quick_: Annotated[bool, quick_option("Two flips.")] = False,
    json: JsonOption = None,
) -> None:
    """Flip a worker whose streams run, and measure the gap that their clients see."""
    with printed_errors():
        plan = check(
            MovesPlan(shape, StreamAsk(streams, input_len, output_len), repeat, seed, beside)
        )
        plan = quick(plan) if quick_ else plan
        if join:
            found = join_results(measure_joins(plan, say_on_stderr()))
            report = report_here("joins", seed=seed, config=config_of(plan), results=found)
            title = f"a decode worker joins beside one with {streams} streams of {plan.shape}"
            publish(report, json, title=title)
            return
        runs = measure(plan, say_on_stderr())
        report = report_here("moves", seed=seed, config=config_of(plan), results=results(runs))
        title = (
            f"{plan.num_repeats} flips of a worker of {plan.shape} with {streams} streams,"
            f" {input_len} tokens in, {output_len} out, to one with {beside}"
        )
        publish(report, json, title=title)
