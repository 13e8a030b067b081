"""The command `baton bench simulator`: its options and its table.

baton bench simulator --trace conversation_trace.jsonl --peer dynamo=/path/to/its/python
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.common.command import JsonOption, SeedOption, printed_errors, publish
from bench.common.machine import report_here
from bench.common.options import peers_named
from bench.common.progress import say_on_stderr
from bench.common.tables import print_results
from bench.comparison.peer import NAME, Dynamo
from bench.comparison.plan import ComparisonPlan
from bench.comparison.results import GOALS
from bench.comparison.run import measure
from bench.simulator.hardware import hardware_named
from bench.simulator.splits import splits_of
from bench.simulator.traces import read_trace
from engine.config import PoolsConfig


def simulator(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    trace: Annotated[Path, typer.Option(help="A trace in Mooncake's format.")],
    hardware_: Annotated[
        str, typer.Option("--hardware", help="A profile.")
    ] = "h200-qwen3-32b-tp2-linear",
    splits: Annotated[
        str, typer.Option(metavar="P+D,…", help="Splits to try; TTFT is of the first.")
    ] = "6+2,5+3,4+4",
    pool_tokens: Annotated[
        float, typer.Option(min=1.0, help="Memory of all workers together, in tokens of KV.")
    ] = 50e6,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Play only the first requests.")
    ] = None,
    goodput_requests: Annotated[
        int, typer.Option(min=0, help="Requests for the goodput; 0 leaves it out.")
    ] = 2000,
    fluid: Annotated[bool, typer.Option(help="Pools take each other's work.")] = True,
    seed: SeedOption = 0,
    peer: Annotated[
        str | None,
        typer.Option(help="dynamo=PYTHON: the peer, and the Python where it is installed."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Simulate a trace at the costs of Dynamo's simulator, and in that simulator."""
    with printed_errors():
        pairs = splits_of(splits)
        programs = peers_named([] if peer is None else [peer], [NAME])
        profile = hardware_named(hardware_)
        num_blocks = -(-int(pool_tokens) // (sum(pairs[0]) * profile.layout.block_size))
        profile = msgspec.structs.replace(profile, num_blocks=num_blocks)
        played = read_trace(trace)
        played = played if requests is None else played.first(requests)
        stretch = PoolsConfig().stretch if fluid else None
        plan = ComparisonPlan(played, profile, pairs, goodput_requests, stretch=stretch, seed=seed)
        with ExitStack() as open_peers:
            full = short = None
            for program in programs:
                full = open_peers.enter_context(Dynamo(program.python, played, profile))
                first = played.first(goodput_requests or 1)
                short = open_peers.enter_context(Dynamo(program.python, first, profile))
            results = measure(plan, full, short, say_on_stderr())
        report = report_here(
            "simulator",
            seed=seed,
            config={
                "trace": played.name,
                "requests": len(played.requests),
                "goodput_requests": goodput_requests,
                "profile": profile.name,
                "kv_blocks": num_blocks,
                "splits": splits,
                "stretch": stretch,
                "ttft_bound_s": plan.ttft_s,
                "tpot_bound_s": plan.tpot_s,
            },
            results=tuple(results),
        )
        title = f"simulated: {len(played.requests)} requests of {played.name}, {profile.name}"
        publish(report, json, title=title, show=partial(print_results, goals=GOALS))
