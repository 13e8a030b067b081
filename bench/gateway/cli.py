"""`baton bench gateway`: its options, and what is printed and written."""

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.common.command import (
    JsonOption,
    RepeatOption,
    SeedOption,
    peer_option,
    printed_errors,
    quick_option,
    save,
)
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.report import Report
from bench.common.tables import print_head, print_warnings
from bench.gateway.plan import GatewayPlan, config_of, plan_of, quick
from bench.gateway.results import GatewayMeasured, results, warnings
from bench.gateway.run import measure


def gateway(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of every prompt.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at 64 streams.")] = 256,
    repeat: RepeatOption = 5,
    peer: Annotated[list[str] | None, peer_option("fastapi", "vllm_router")] = None,
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
        report = _report(plan, measured)
        save(report, json)
        _print(Console(), report)
        print_warnings(Console(), warnings(plan, measured))


def _report(plan: GatewayPlan, measured: GatewayMeasured) -> Report:
    versions = {f"version_{name}": version for name, version in measured.versions.items()}
    return report_here(
        "gateway",
        seed=plan.seed,
        config=config_of(plan) | versions,
        results=results(plan, measured),
    )


def _print(console: Console, report: Report) -> None:
    peers = list(dict.fromkeys(peer for result in report.results for peer in result.peers))
    table = Table("result", "unit", "ours", "limit", *peers, box=box.SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    table.columns[0].no_wrap = True
    for result in report.results:
        spread = f"{_number(min(result.runs))} … {_number(max(result.runs))}"
        limit = "" if result.limit is None else _number(result.limit)
        share = "" if result.of_limit is None else f"\n{result.of_limit:.0%} of it"
        cells = [result.peers.get(peer) for peer in peers]
        table.add_row(
            result.name,
            result.unit,
            f"{_number(result.value)}\n{spread}",
            limit + share,
            *("" if p is None else f"{_number(p.value)}\n× {p.ratio:.2f}" for p in cells),
        )
    print_head(console, report, title="gateway, in front of a worker that computes nothing")
    console.print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
