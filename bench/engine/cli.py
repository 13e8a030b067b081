"""`baton bench engine`: its options, and what is printed, written and plotted."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.common.driven import DrivenFailed
from bench.common.machine import commit, hardware
from bench.common.plots import plot_bars, require_matplotlib
from bench.common.report import Report, write_json
from bench.common.shapes import SHAPES
from bench.common.tables import print_speeds, print_warnings
from bench.engine.plan import EnginePlan, Job, check, config_of, jobs_of, peers_of, quick
from bench.engine.results import Measured, results, warnings
from bench.engine.run import measure
from engine.config import WeightFormat
from engine.errors import BatonError, ConfigError
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
        KVFormat | None, typer.Option(help="Format of KV.", show_default="that of the weights")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine.", show_default="all cores")
    ] = None,
    prefill_lens: Annotated[str, typer.Option(help="Prompt lengths to prefill.")] = "128,512,2048",
    batches: Annotated[str, typer.Option(help="Batch sizes of the decode grid.")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="Contexts of the decode grid.")] = "128,512,2048",
    repeat: Annotated[int, typer.Option(min=1, help="Runs; results are their medians.")] = 5,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PYTHON",
            help="Also measure transformers, vllm or llamacpp, run by that Python; repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and prompts.")] = 0,
    quick_: Annotated[
        bool, typer.Option("--quick", help="One run of fewer jobs: under 50 s without peers.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write bars of all speeds here (PNG).")] = None,
) -> None:
    """Measure prefill and decode of the engine alone, beside the machine's limits and peers."""
    console = Console()
    log = Console(stderr=True)
    try:
        plan = EnginePlan(
            shape=shape,
            checkpoint=checkpoint,
            weights=_weights(weights),
            kv_format=kv_dtype,
            num_threads=threads or hardware().num_cores,
            prefill_lens=_numbers("--prefill-lens", prefill_lens),
            batches=_numbers("--batches", batches),
            contexts=_numbers("--contexts", contexts),
            num_repeats=repeat,
            peers=tuple(engine for option in peer or () for engine in peers_of(option)),
            seed=seed,
        )
        plan = check(quick(plan) if quick_ else plan)
        if plot:
            require_matplotlib()
        measured = measure(plan, say=lambda line: log.print(line, style="dim"))
        report = _report(plan, measured)
        if json:
            write_json(report, json)
        if plot:
            _plot(plan, report, plot)
        print_speeds(console, report, title=_title(plan))
        print_warnings(console, warnings(measured))
    except DrivenFailed as error:
        typer.echo(f"error: {error}\n" + "\n".join(error.last_lines), err=True)
        raise typer.Exit(1) from error
    except (BatonError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _weights(text: str) -> tuple[WeightFormat, ...]:
    try:
        return tuple(dict.fromkeys(WeightFormat(name) for name in text.split(",") if name))
    except ValueError as error:
        raise ConfigError(f"--weights: {error}") from error


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",") if number))
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is not a list of numbers") from error


def _report(plan: EnginePlan, measured: Measured) -> Report:
    failed = {f"failed_{failed.name}": failed.reason for failed in measured.failed}
    versions = {f"version_{name}": version for name, version in measured.versions.items()}
    return Report(
        bench="engine",
        commit=commit(),
        hardware=hardware(),
        seed=plan.seed,
        config=config_of(plan) | versions | failed,
        results=results(plan, measured),
    )


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


def _panel(job: Job) -> str:
    """Where a job's bars stand: jobs for peers by themselves, the others by kind and batch."""
    if job.for_peers:
        return f"{job.name}, tokens/s"
    name = f"decode, batch {job.num_sequences}" if job.num_steps else "prefill by length"
    return f"{name}, tokens/s"


def _bar(job: Job, weights: str) -> str:
    return weights if job.for_peers else f"{weights}, {job.context_len}"
