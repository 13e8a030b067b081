"""`baton bench kv`: its options, and what is printed, written and plotted."""

from importlib.util import find_spec
from typing import Annotated

import typer

from bench.common.command import (
    JsonOption,
    PlotOption,
    RepeatOption,
    SeedOption,
    numbers_of,
    peer_option,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import report_here
from bench.common.options import peers_named
from bench.common.plots import require_matplotlib
from bench.common.progress import Say, say_on_stderr
from bench.common.report import Missing, Report, notes_on
from bench.common.shapes import SHAPES
from bench.kv import handoff as kv_handoff
from bench.kv.plan import (
    BACKENDS,
    BLOCK_SIZES,
    HANDOFF_TRANSPORTS,
    KIB,
    PEERS,
    PROMPT_LEN,
    HandoffPlan,
    KvPlan,
    check,
    config_of,
    quick,
)
from bench.kv.plots import plot_kv
from bench.kv.results import Handoffs, KvMeasured, results, warnings
from bench.kv.run import measure
from engine.errors import BatonError

DEFAULT_BACKENDS = ",".join(BACKENDS)
DEFAULT_BLOCK_SIZES = ",".join(str(size // KIB) for size in BLOCK_SIZES)


def kv(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    backends: Annotated[str, typer.Option(help="Which of these to measure.")] = DEFAULT_BACKENDS,
    block_sizes: Annotated[str, typer.Option(help="KiB of a block.")] = DEFAULT_BLOCK_SIZES,
    shards: Annotated[
        str, typer.Option(help="Pull half of the heads too, in pieces of so many KiB.")
    ] = "",
    handoff: Annotated[bool, typer.Option(help="Measure handoffs of `baton serve` too.")] = True,
    shape: Annotated[
        str, typer.Option(help=f"Random weights for the handoff: {', '.join(SHAPES)}.")
    ] = "88m",
    prompt_len: Annotated[int, typer.Option(help="Tokens of a handoff's prompt.")] = PROMPT_LEN,
    repeat: RepeatOption = 7,
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("Two block sizes, one transport: under 50 s.")] = False,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure how fast KV moves, beside this machine's limits and peers, and the delay it adds."""
    say = say_on_stderr()
    with printed_errors():
        plan = KvPlan(
            block_sizes=tuple(kib * KIB for kib in numbers_of("--block-sizes", block_sizes)),
            backends=tuple(dict.fromkeys(name for name in backends.split(",") if name)),
            piece_sizes=tuple(kib * KIB for kib in numbers_of("--shards", shards)),
            num_repeats=repeat,
            handoff=HandoffPlan(shape, HANDOFF_TRANSPORTS, 4, num_repeats=3, prompt_len=prompt_len)
            if handoff
            else None,
            peers=peers_named(peer or (), PEERS),
            seed=seed,
        )
        plan = check(quick(plan) if quick_ else plan)
        if plot:
            require_matplotlib()
        handoffs, not_handed = _handoffs(plan, say)
        measured = measure(plan, say)
        report = _report(plan, measured, handoffs, not_handed)
        lines = [*warnings(measured, handoffs), *(missing.told for missing in not_handed)]
        publish(report, json, title=_title(plan), warnings=lines)
        if plot:
            plot_kv(report, plot, title=_title(plan))


def _handoffs(plan: KvPlan, say: Say) -> tuple[list[Handoffs], list[Missing]]:
    """Measures handoffs over every transport. The second list has those that failed."""
    if plan.handoff is None:
        return [], []
    if find_spec("torch") is None:
        reason = "a worker needs torch (pip install 'baton-serve[worker]')"
        return [], [Missing("handoff", reason)]
    handoffs, missing = [], []
    for transport in plan.handoff.transports:
        say(f"handing requests over by {transport}")
        try:
            handoffs.append(kv_handoff.measure(plan.handoff, transport, seed=plan.seed))
        except BatonError as error:
            missing.append(Missing(f"handoff over {transport}", str(error)))
    return handoffs, missing


def _report(
    plan: KvPlan, measured: KvMeasured, handoffs: list[Handoffs], not_handed: list[Missing]
) -> Report:
    notes = notes_on(measured.versions, [*measured.missing, *not_handed])
    return report_here(
        "kv",
        seed=plan.seed,
        config=config_of(plan) | notes,
        results=results(plan, measured, handoffs),
    )


def _title(plan: KvPlan) -> str:
    runs = "once" if plan.num_repeats == 1 else f"{plan.num_repeats} times"
    return f"KV transfer, {plan.total_bytes // 2**20} MiB in scattered blocks, each case {runs}"
