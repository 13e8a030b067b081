"""The command `baton bench elastic`: its options and its table.

baton bench elastic --json elastic.json
"""

from functools import partial
from typing import Annotated

import typer

from bench.client.load import SloBounds
from bench.common.command import JsonOption, SeedOption, printed_errors, publish, quick_option
from bench.common.machine import report_here
from bench.common.progress import say_on_stderr
from bench.common.tables import print_results
from bench.elastic.plan import ElasticPlan, TurningLoad
from bench.elastic.results import GOALS
from bench.elastic.run import measure
from bench.simulator.hardware import hardware_named
from engine.errors import ConfigError


def elastic(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    hardware_: Annotated[str, typer.Option("--hardware", help="A profile.")] = "h200-qwen3-32b-tp2",
    workers: Annotated[int, typer.Option(min=2, help="Simulated workers.")] = 32,
    phases: Annotated[
        int, typer.Option(min=1, help="Phases, which alternate between reading and writing.")
    ] = 4,
    phase_s: Annotated[float, typer.Option(min=1.0, help="Length of a phase in seconds.")] = 120.0,
    step: Annotated[int, typer.Option(min=1, help="Fixed splits tried: 2, 2 + step, …")] = 2,
    slo_ttft_ms: Annotated[float, typer.Option(min=1.0, help="Bound on TTFT.")] = 5000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=1.0, help="Bound on TPOT.")] = 25.0,
    repeat: Annotated[int, typer.Option(min=1, help="Loads, each with its own seed.")] = 3,
    seed: SeedOption = 0,
    quick: Annotated[bool, quick_option("Once, 6 workers, short phases: under 50 s.")] = False,
    json: JsonOption = None,
) -> None:
    """Simulate an alternating load on fixed splits of the workers and on planned pools."""
    with printed_errors():
        if quick:
            workers, phases, phase_s, step, repeat = min(workers, 6), 2, min(phase_s, 45.0), 1, 1
        plan = ElasticPlan(
            hardware_named(hardware_),
            TurningLoad(phases, phase_s),
            workers,
            splits=_splits(workers, step),
            seeds=range(seed, seed + repeat),
            slo=SloBounds.from_ms(slo_ttft_ms, slo_tpot_ms),
        )
        report = report_here(
            "elastic",
            seed=seed,
            config={
                "profile": plan.hardware.name,
                "workers": workers,
                "phases": phases,
                "phase_s": phase_s,
                "splits": ",".join(map(str, plan.splits)),
                "loads": repeat,
                "ttft_bound_s": plan.slo.ttft_s,
                "tpot_bound_s": plan.slo.tpot_s,
            },
            results=measure(plan, say_on_stderr()),
        )
        title = (
            f"simulated: a load that changes every {phase_s:g} s, {workers} × {plan.hardware.name}"
        )
        publish(report, json, title=title, show=partial(print_results, goals=GOALS))


def _splits(num_workers: int, step: int) -> tuple[int, ...]:
    """Returns numbers of prefill workers, leaving two of each role (one in small clusters)."""
    least = 2 if num_workers > 8 else 1
    splits = tuple(range(least, num_workers - least + 1, step))
    if not splits:
        raise ConfigError(f"--workers {num_workers}: too few to be split")
    return splits
