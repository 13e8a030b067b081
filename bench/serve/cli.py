"""`baton bench serve`: its options, and its output as text, files and plots."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.client.load import LoadRun, SloBounds, figures_of_runs, num_within, warnings
from bench.common.command import (
    JsonOption,
    PlotOption,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
    say_on_stderr,
)
from bench.common.plots import panels_of, plot_load, require_matplotlib
from bench.common.report import Figure, Report, report_here, results_of
from bench.serve.html import page_of, spans_of
from bench.serve.lengths import LengthSpread, TalkShape
from bench.serve.plan import (
    ServeAsk,
    ServeLoad,
    ServePlan,
    ServeReplay,
    ServeTarget,
    check,
    config_of,
    quick,
    rate_text,
    shape_of,
    sized,
)
from bench.serve.processes import measure_shown
from bench.serve.records import GOAL, HIGHEST, SHARE_AT, RateSearch, SweepGoal, csv_of
from bench.serve.run import ServeMeasured
from engine.command_options import expanded
from engine.errors import ConfigError

SWEEP_STEP_S = 10.0  # least seconds of a trial's arrivals


@expanded
def serve(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    target: ServeTarget,
    load: ServeLoad,
    ask: ServeAsk,
    talk: TalkShape,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Replay the times, lengths and prefixes of a Mooncake, Azure or Baton trace.",
        ),
    ] = None,
    speed_up: Annotated[float, typer.Option(help="Factor on a trace's rate.")] = 1.0,
    shorten: Annotated[int, typer.Option(min=1, help="Divisor of a trace's lengths.")] = 1,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Bound on TTFT; adds goodput to the report.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Bound on TPOT; adds goodput to the report.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Search the highest rate within the bounds.")
    ] = False,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share that a sweep wants within bounds.")
    ] = 0.9,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("At most 16 short requests: under 50 s.")] = False,
    json: JsonOption = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row for each request here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here.")] = None,
    plot: PlotOption = None,
) -> None:
    """Send a load to an OpenAI-compatible server and report latency and throughput."""
    is_bounded = slo_ttft_ms is not None or slo_tpot_ms is not None
    with printed_errors():
        plan = ServePlan(
            target,
            load,
            ask,
            slo=SloBounds.from_ms(slo_ttft_ms, slo_tpot_ms) if is_bounded else None,
            seed=seed,
            talk=talk,
            replay=ServeReplay(trace, speed_up, shorten) if trace else None,
        )
        plan = sized(check(quick(plan) if quick_ else plan))
        for option, path in (("--plot", plot), ("--html", html)):
            if path:
                require_matplotlib(option)
        found: dict[str, Figure] = {}
        if sweep:
            plan, measured, found = swept(plan, SweepGoal(attainment), measure_shown)
        else:
            measured = measure_shown(plan)
        report = report_here(
            "serve",
            seed=plan.seed,
            config=config_of(plan, measured.model) | ({GOAL: attainment} if sweep else {}),
            results=(
                *results_of([found]),
                *results_of(figures_of_runs(measured.runs, plan.slo)),
            ),
        )
        title, lines = _title(plan, report), _warnings(plan, measured.runs)
        publish(report, json, title=title, warnings=lines)
        if csv:
            _write(csv, csv_of(measured.runs, plan.slo))
        if html:
            _write(html, page_of(report, measured.runs, plan.slo, title=title, warnings=lines))
        if plot:
            _plot(measured.runs, plan.slo, report, plot, title=title)


def swept(
    plan: ServePlan, goal: SweepGoal, measure: Callable[[ServePlan], ServeMeasured]
) -> tuple[ServePlan, ServeMeasured, dict[str, Figure]]:
    """Searches for the highest rate within the bounds. Returns the plan at this rate, its
    measurement, and the sweep's figures.

    Raises ConfigError if the plan has no bounds or no rate, or if no rate passes.
    """
    _check_sweep(plan)
    say, search = say_on_stderr(), RateSearch(plan.load.rate_per_s, goal)
    best: tuple[ServePlan, ServeMeasured] | None = None
    seed = plan.seed
    while (rate := search.next_per_s) is not None:
        number = max(plan.load.num_requests, round(rate * SWEEP_STEP_S))
        load = replace(plan.load, rate_per_s=rate, num_requests=number, num_repeats=1)
        # a new seed for each trial, so that its prompts are not cached
        trial, seed = replace(plan, load=load, seed=seed), seed + 1
        measured = measure(trial)
        [run] = measured.runs
        step = search.record(num_within(run, plan.slo or SloBounds()), len(run.outcomes))
        verdict = {None: "again", True: "passed", False: "failed"}[step.passed]
        unsure = "" if step.is_sure or step.passed is None else ", unsure"
        say(f"{rate:.3g}/s: {step.num_met} of {step.num_sent} within bounds: {verdict}{unsure}")
        if step.passed:
            best = trial, measured
    if best is None or search.found_per_s is None:
        raise ConfigError(
            "--sweep: no rate keeps the bounds; widen them, or begin with a lower --rate"
        )
    if not search.is_bounded:
        say("no rate failed: the true limit is higher")
    figures = {HIGHEST: Figure(search.found_per_s, "req/s")}
    for step in sorted(search.steps, key=lambda one: one.rate_per_s):
        figures[f"{SHARE_AT}{step.rate_per_s:.3g}"] = Figure(step.share, "share")
    return *best, figures


def _check_sweep(plan: ServePlan) -> None:
    if plan.slo is None:
        raise ConfigError("--sweep needs --slo-ttft-ms or --slo-tpot-ms")
    if plan.load.clients is not None or plan.replay is not None or plan.load.ramp_to_per_s:
        raise ConfigError("--sweep changes --rate: leave out --clients, --trace and --ramp-to")
    if plan.load.rate_per_s == float("inf"):
        raise ConfigError("--sweep needs a finite --rate to begin with")


def _warnings(plan: ServePlan, runs: tuple[LoadRun, ...]) -> list[str]:
    """Returns the warnings about a load. Lengths are checked only if the plan fixes them."""
    ask, is_plain = plan.ask, plan.replay is None and plan.talk.is_single

    def fixed_len(spread: LengthSpread) -> float | None:
        return spread.least if is_plain and spread.least == spread.most else None

    return warnings(
        runs,
        input_len=fixed_len(ask.input_len),
        output_len=fixed_len(ask.output_len),
        is_shared=not is_plain or ask.shared_prefix_len > 0,
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _plot(
    runs: tuple[LoadRun, ...], slo: SloBounds | None, report: Report, path: Path, *, title: str
) -> None:
    answers = [answer for run in runs for answer in run.answers]
    bounds_ms = {
        name: None if bound_s is None else bound_s * 1e3
        for name, bound_s in (
            ("TTFT", slo.ttft_s if slo else None),
            ("TPOT", slo.tpot_s if slo else None),
        )
    }
    plot_load(
        {
            "TTFT": [answer.ttft_s * 1e3 for answer in answers],
            "TPOT": [answer.tpot_s * 1e3 for answer in answers if answer.tpot_s is not None],
            "ITL, between chunks": [gap_s * 1e3 for answer in answers for gap_s in answer.gaps_s],
        },
        panels_of(
            spans_of(runs[-1]), bound_ttft_ms=bounds_ms["TTFT"], bound_tpot_ms=bounds_ms["TPOT"]
        ),
        path,
        title=f"{title}\n{report.hardware.cpu}, commit {report.commit}",
        bounds_ms=bounds_ms,
    )


def _title(plan: ServePlan, report: Report) -> str:
    load = plan.load
    times = f"{load.num_repeats} × " if load.num_repeats > 1 else ""
    what = f"{times}{load.num_requests} requests {rate_text(plan)}{shape_of(plan)}"
    return f"{report.config['model']} at {report.config['url']}: {what}"
