"""The command `baton bench tiers`: its options and its table.

baton bench tiers --trace conversation_trace.jsonl --json tiers.json
"""

from pathlib import Path
from typing import Annotated

import typer

from bench.common.command import JsonOption, SeedOption, printed_errors, publish, quick_option
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.simulator.cluster import SimulatedPools
from bench.simulator.hardware import hardware_named
from bench.simulator.tiers import GIB
from bench.simulator.traces import read_trace
from bench.tiers.study import TiersPlan, study

QUICK_REQUESTS = 1000


def tiers(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    trace: Annotated[Path, typer.Option(help="A trace with shared prefixes, as Mooncake's.")],
    hardware_: Annotated[str, typer.Option("--hardware", help="A profile.")] = "h200-qwen3-32b-tp2",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 6,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 2,
    memory_tokens: Annotated[
        float, typer.Option(help="KV in memory of all stores together.")
    ] = 50e6,
    disk_tokens: Annotated[float, typer.Option(help="KV on disks of all stores together.")] = 500e6,
    take_gib_per_s: Annotated[
        float, typer.Option(help="A store takes blocks from workers no faster.")
    ] = 20.0,
    node_workers: Annotated[int, typer.Option(min=1, help="Workers of a node.")] = 8,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Play only the first requests.")
    ] = None,
    seed: SeedOption = 0,
    quick: Annotated[bool, quick_option(f"{QUICK_REQUESTS} requests.")] = False,
    json: JsonOption = None,
) -> None:
    """Simulate a trace with stores of KV of several sizes, and without."""
    with printed_errors():
        read = read_trace(trace)
        limit = QUICK_REQUESTS if quick else requests
        plan = TiersPlan(
            read if limit is None else read.first(limit),
            hardware_named(hardware_),
            SimulatedPools(prefill, decode),
            memory_tokens=memory_tokens,
            disk_tokens=disk_tokens,
            take_bytes_per_s=take_gib_per_s * GIB,
            node_workers=node_workers,
            seed=seed,
        )
        blocks = plan.hardware.num_blocks * plan.pools.total
        report = report_here(
            "tiers",
            seed=seed,
            config={
                "trace": plan.trace.name,
                "requests": len(plan.trace.requests),
                "profile": plan.hardware.name,
                "prefill": prefill,
                "decode": decode,
                "worker_tokens": blocks * plan.hardware.layout.block_size,
                "memory_tokens": memory_tokens,
                "disk_tokens": disk_tokens,
                "take_gib_per_s": take_gib_per_s,
                "node_workers": node_workers,
            },
            results=study(plan, say_on_stderr()),
        )
        title = (
            f"simulated: {len(plan.trace.requests)} requests of {plan.trace.name} on "
            f"{prefill} + {decode} × {plan.hardware.name}, with and without stores"
        )
        publish(report, json, title=title)
