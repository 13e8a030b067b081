"""The command `baton bench fluid`: its options and its two reports.

baton bench fluid --json fluid.json
baton bench fluid --simulated --trace conversation_trace.jsonl --json fluid_simulated.json
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from bench.client.load import SloBounds
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
from bench.common.tables import print_results
from bench.elastic.plan import TurningLoad
from bench.fluid.loops import Loops
from bench.fluid.plan import (
    LIVE_PARTS,
    SIMULATED_PARTS,
    WINDOW_S,
    FluidPart,
    FluidPlan,
    check,
    config_of,
    mixes_of,
    parts_of,
    quick,
)
from bench.fluid.results import GOALS, results, warnings
from bench.fluid.run import measure
from bench.fluid.simulated import (
    CHUNKS,
    QUICK_CHUNKS,
    QUICK_TURNS,
    TURNS,
    SimulatedFluidPlan,
    splits_near,
    splits_of_all,
    study,
)
from bench.fluid.simulated import GOALS as SIMULATED_GOALS
from bench.lab.streams import StreamAsk
from bench.simulator.cluster import SimulatedPools
from bench.simulator.goodput import ATTAINMENT
from bench.simulator.hardware import hardware_named
from bench.simulator.traces import Chat, Trace, read_trace, synthetic
from engine.config import PoolsConfig

LOADS = ("synthetic", "turning")
NUM_REQUESTS = 1000
QUICK_REQUESTS = 150


def fluid(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    shape: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "88m",
    mixes: Annotated[
        str, typer.Option(help="Tokens in and out of requests; `turning` alternates.")
    ] = "1024/16,256/64,64/256,turning",
    parts: Annotated[
        str | None, typer.Option(help="Out of: mixes, bound; simulated: mixes, goodput.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Of a closed loop.")] = 8,
    window_s: Annotated[
        float, typer.Option(min=1.0, help="Measured part of a loop, for each of its phases.")
    ] = WINDOW_S,
    phase_s: Annotated[float, typer.Option(min=0.5, help="Phase of the turning mix.")] = 2.5,
    streams: Annotated[int, typer.Option(min=1, help="Streams beside prompts.")] = 4,
    stream_output: Annotated[int, typer.Option(min=8, help="Output tokens of each.")] = 640,
    prompt_input: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    prompt_output: Annotated[int, typer.Option(min=1, help="Tokens that answer it.")] = 1,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Simulate a cluster; measure nothing.")
    ] = False,
    trace: Annotated[
        list[str] | None,
        typer.Option(help=f"Simulated load: a file or {', '.join(LOADS)}; repeatable."),
    ] = None,
    hardware_: Annotated[
        str, typer.Option("--hardware", help="A simulated profile.")
    ] = "h200-qwen3-32b-tp2",
    prefill: Annotated[int, typer.Option(min=1, help="Simulated prefill workers.")] = 6,
    decode: Annotated[int, typer.Option(min=1, help="Simulated decode workers.")] = 2,
    requests: Annotated[
        int, typer.Option(min=2, help="Simulate the first requests of a trace.")
    ] = NUM_REQUESTS,
    stretch: Annotated[
        float, typer.Option(min=1.01, help="Of simulated steps by prompts.")
    ] = PoolsConfig().stretch,
    slo_ttft_ms: Annotated[float, typer.Option(min=1.0, help="Simulated bound.")] = 5000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=1.0, help="Simulated bound.")] = 25.0,
    repeat: RepeatOption = 6,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("Few settings, once: under a minute.")] = False,
    json: JsonOption = None,
) -> None:
    """Compare fluid pools with walled and mixed ones, on this machine or simulated."""
    with printed_errors():
        if simulated:
            pools = SimulatedPools(prefill, decode)
            simulated_parts = parts_of(parts, SIMULATED_PARTS)
            limit = min(requests, QUICK_REQUESTS) if quick_ else requests
            simulated_plan = SimulatedFluidPlan(
                hardware_named(hardware_),
                loads_of(trace or LOADS, limit, pools.total, seed=seed, is_quick=quick_)
                if FluidPart.GOODPUT in simulated_parts
                else {},
                pools,
                splits=splits_near(pools) if quick_ else splits_of_all(pools.total),
                chunks=QUICK_CHUNKS if quick_ else CHUNKS,
                slo=SloBounds.from_ms(slo_ttft_ms, slo_tpot_ms),
                loops=Loops(
                    mixes_of(mixes) if FluidPart.MIXES in simulated_parts else (),
                    clients,
                    window_s=window_s,
                    phase_s=phase_s,
                ),
                stretch=stretch,
                seed=seed,
            )
            _simulate(simulated_plan, json)
            return
        plan = check(
            FluidPlan(
                shape,
                mixes_of(mixes),
                streams=StreamAsk(streams, 64, stream_output),
                prompts=StreamAsk(1, prompt_input, prompt_output),
                parts=parts_of(parts, LIVE_PARTS),
                num_clients=clients,
                window_s=window_s,
                phase_s=phase_s,
                num_repeats=repeat,
                seed=seed,
            )
        )
        _measure(quick(plan) if quick_ else plan, json)


def loads_of(
    names: Sequence[str], num_requests: int, num_workers: int, *, seed: int, is_quick: bool
) -> Mapping[str, Trace]:
    """Returns the loads by their names in results. Raises TraceError."""
    turns: TurningLoad = QUICK_TURNS if is_quick else TURNS
    loads: dict[str, Trace] = {}
    for name in names:
        if name == "synthetic":
            loads[name] = synthetic(Chat(), num_requests, Random(seed))
        elif name == "turning":
            loads[name] = turns.trace(num_workers, seed)
        else:
            path = Path(name)
            loads[path.stem] = read_trace(path).first(num_requests)
    return loads


def _measure(plan: FluidPlan, json: Path | None) -> None:
    measured = measure(plan, say_on_stderr())
    report = report_here(
        "fluid",
        seed=plan.seed,
        config=config_of(plan, measured.pace),
        results=results(measured.runs),
    )
    title = f"two workers of one thread, {plan.shape}, {plan.num_clients} clients"
    show = partial(print_results, goals=GOALS)
    publish(report, json, title=title, show=show, warnings=warnings(measured.runs))


def _simulate(plan: SimulatedFluidPlan, json: Path | None) -> None:
    report = report_here(
        "fluid_simulated",
        seed=plan.seed,
        config={
            "profile": plan.hardware.name,
            "prefill": plan.fluid.prefill,
            "decode": plan.fluid.decode,
            "splits": len(plan.splits),
            "stretch": plan.stretch,
            "chunks": ",".join(map(str, plan.chunks)),
            "ttft_bound_s": plan.slo.ttft_s,
            "tpot_bound_s": plan.slo.tpot_s,
            "attainment": ATTAINMENT,
            "mixes": ",".join(mix.name for mix in plan.loops.mixes),
            "clients": plan.loops.num_clients,
            "window_s": plan.loops.window_s,
            "phase_s": plan.loops.phase_s,
            **{f"requests_{name}": len(trace.requests) for name, trace in plan.loads.items()},
        },
        results=study(plan, say_on_stderr()),
    )
    title = (
        f"simulated: {plan.fluid.total} × {plan.hardware.name}, fluid"
        f" {plan.fluid.prefill} + {plan.fluid.decode} beside walled splits and mixed workers"
    )
    publish(report, json, title=title, show=partial(print_results, goals=SIMULATED_GOALS))
