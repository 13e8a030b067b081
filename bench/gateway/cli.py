"""`baton bench gateway`: its options, and what is printed and written."""

from typing import Annotated

import typer

from bench.common.command import (
    JsonOption,
    RepeatOption,
    SeedOption,
    peer_option,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.report import notes_on
from bench.gateway.plan import PEERS, config_of, plan_of, quick
from bench.gateway.results import results, warnings
from bench.gateway.run import measure


def gateway(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of every prompt.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at 64 streams.")] = 256,
    repeat: RepeatOption = 5,
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("One short run: some seconds.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure what the gateway adds to a first token, and its CPU, beside other servers."""
    with printed_errors():
        plan = plan_of(
            prompt_words=prompt_words,
            num_tokens=tokens,
            num_repeats=repeat,
            peers=peer or (),
            seed=seed,
        )
        plan = quick(plan) if quick_ else plan
        measured = measure(plan, say_on_stderr())
        report = report_here(
            "gateway",
            seed=plan.seed,
            config=config_of(plan) | notes_on(measured.versions),
            results=results(plan, measured),
        )
        title = "gateway, in front of a worker that computes nothing"
        publish(report, json, title=title, warnings=warnings(plan, measured))
