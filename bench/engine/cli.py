"""`baton bench engine`: its options, and what is printed, written and plotted."""

from pathlib import Path
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
    quick_option,
    say_on_stderr,
    show_report,
    values_of,
    write_report,
)
from bench.common.plots import plot_bars, require_matplotlib
from bench.common.report import Report, hardware, notes_on, report_here
from bench.common.shapes import SHAPES
from bench.engine.plan import (
    PEERS,
    EngineJob,
    EnginePlan,
    check,
    config_of,
    jobs_of,
    peers_of,
    quick,
)
from bench.engine.results import check_limits, results, warnings
from bench.engine.run import measure
from engine.config import WeightFormat
from engine.layout import KVFormat


def engine(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    shape: Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")] = "88m",
    checkpoint: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A real model instead.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Formats to measure: fp32, bf16, int8.")] = (
        "fp32,int8"
    ),
    kv_dtype: Annotated[
        KVFormat | None, typer.Option(help="Format of KV.", show_default="the weights' format")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine.", show_default="all cores")
    ] = None,
    prefill_lens: Annotated[str, typer.Option(help="Prompt lengths to prefill.")] = "128,512,2048",
    batches: Annotated[str, typer.Option(help="Batch sizes of the decode grid.")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="Contexts of the decode grid.")] = "128,512,2048",
    repeat: RepeatOption = 5,
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None,
    seed: SeedOption = 0,
    quick_: Annotated[
        bool, quick_option("One run of fewer jobs: under 50 s without peers.")
    ] = False,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure prefill and decode of the engine alone, beside this machine's limits and peers."""
    with printed_errors():
        plan = EnginePlan(
            shape=shape,
            checkpoint=checkpoint,
            weights=values_of(
                "--weights", weights, WeightFormat, f"a list of {', '.join(WeightFormat)}"
            ),
            kv_format=kv_dtype,
            num_threads=threads or hardware().num_cores,
            prefill_lens=numbers_of("--prefill-lens", prefill_lens),
            batches=numbers_of("--batches", batches),
            contexts=numbers_of("--contexts", contexts),
            num_repeats=repeat,
            peers=peers_of(peer or ()),
            seed=seed,
        )
        plan = check(quick(plan) if quick_ else plan)
        if plot:
            require_matplotlib()
        measured = measure(plan, say=say_on_stderr())
        report = report_here(
            "engine",
            seed=plan.seed,
            config=config_of(plan) | notes_on(measured.versions, measured.failed),
            results=results(plan, measured),
        )
        show_report(report, title=_title(plan), warnings=warnings(measured))
        check_limits(report.results)
        write_report(report, json)
        if plot:
            _plot(plan, report, plot)


def _title(plan: EnginePlan) -> str:
    model = plan.checkpoint or f"{plan.shape} with random weights"
    runs = "once" if plan.num_repeats == 1 else f"{plan.num_repeats} times"
    return f"{model}: {plan.num_threads} threads, each job {runs}"


def _plot(plan: EnginePlan, report: Report, path: Path) -> None:
    panels: dict[str, dict[str, float]] = {}
    limits: dict[str, dict[str, float]] = {}
    speeds = {result.name: result for result in report.results}
    for job in jobs_of(plan):
        bars = panels.setdefault(_panel(job), {})
        marks = limits.setdefault(_panel(job), {})
        for weights in plan.weights:
            speed = speeds[f"{job.name}/{weights}"]
            name = _bar(job, weights)
            bars[name] = speed.value
            if speed.limit is not None:
                marks[name] = speed.limit
        for weights in plan.weights:
            peers = speeds[f"{job.name}/{weights}"].peers
            bars |= {name: peer.value for name, peer in peers.items()}
    title = f"{_title(plan)}; lines are limits\n{report.hardware.cpu}, commit {report.commit}"
    plot_bars(panels, path, title=title, limits=limits)


def _panel(job: EngineJob) -> str:
    """Returns the title of a job's panel: jobs with peers have their own panel, other jobs share
    one by kind and batch.
    """
    if job.for_peers:
        return f"{job.name}, tokens/s"
    name = f"decode, batch {job.num_sequences}" if job.num_steps else "prefill by length"
    return f"{name}, tokens/s"


def _bar(job: EngineJob, weights: str) -> str:
    return weights if job.for_peers else f"{weights}, {job.context_len}"
