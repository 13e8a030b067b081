"""`baton bench serve`: its options, and what is printed, written and plotted."""

from pathlib import Path
from typing import Annotated

import typer
import uvloop

from bench.client.answers import Endpoint
from bench.client.load import SloBounds, figures_of_runs, warnings
from bench.common.command import (
    JsonOption,
    PlotOption,
    RepeatOption,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import report_here
from bench.common.plots import plot_cdfs, require_matplotlib
from bench.common.report import Report, results_of
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget, check, config_of, quick
from bench.serve.run import ServeMeasured, measure


def serve(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(help="Requests/s; inf sends all at once.")] = 4.0,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 64,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens a request.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens a request.")] = 64,
    burstiness: Annotated[
        float, typer.Option(help="Gamma shape of the gaps: 1 Poisson, less bursts, more even.")
    ] = 1.0,
    concurrency_limit: Annotated[
        int | None, typer.Option(min=1, help="Most requests in flight.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name.", show_default="the first listed")
    ] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="Which API to ask.")] = Endpoint.COMPLETIONS,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of a tokenizer.json: prompts are token ids of exact length.",
        ),
    ] = None,
    shared_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens of a prefix that all prompts share.")
    ] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="BATON_API_KEY", help="Sent as a bearer token.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Limit for one request.")] = 120.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Bound on TTFT; adds goodput to the report.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Bound on TPOT; adds goodput to the report.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first and not measured.")] = 2,
    repeat: RepeatOption = 1,
    seed: SeedOption = 0,
    quick_: Annotated[bool, quick_option("At most 16 short requests: under 50 s.")] = False,
    json: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Send an open-loop load to an OpenAI-compatible server and report latency and throughput."""
    is_bounded = slo_ttft_ms is not None or slo_tpot_ms is not None
    plan = ServePlan(
        target=ServeTarget(url, endpoint, model, api_key, timeout_s),
        load=ServeLoad(rate, requests, burstiness, concurrency_limit, warmup, repeat),
        ask=ServeAsk(input_len, output_len, shared_prefix_len, temperature, tokenizer),
        slo=SloBounds.from_ms(slo_ttft_ms, slo_tpot_ms) if is_bounded else None,
        seed=seed,
    )
    with printed_errors():
        plan = check(quick(plan) if quick_ else plan)
        if plot:
            require_matplotlib()
        measured: ServeMeasured = uvloop.run(measure(plan))
        report = report_here(
            "serve",
            seed=plan.seed,
            config=config_of(plan, measured.model),
            results=results_of(figures_of_runs(measured.runs, plan.slo)),
        )
        lens = {"input_len": plan.ask.input_len, "output_len": plan.ask.output_len}
        title = _title(plan, report)
        publish(report, json, title=title, warnings=warnings(measured.runs, **lens))
        if plot:
            _plot(measured, report, plot, title=title)


def _plot(measured: ServeMeasured, report: Report, path: Path, *, title: str) -> None:
    answers = [answer for run in measured.runs for answer in run.answers]
    plot_cdfs(
        {
            "TTFT": [answer.ttft_s * 1e3 for answer in answers],
            "ITL, between chunks": [gap_s * 1e3 for answer in answers for gap_s in answer.gaps_s],
        },
        path,
        title=f"{title}\n{report.hardware.cpu}, commit {report.commit}",
    )


def _title(plan: ServePlan, report: Report) -> str:
    load, ask = plan.load, plan.ask
    return (
        f"{report.config['model']} at {report.config['url']}: {load.num_repeats} ×"
        f" {load.num_requests} requests at {load.rate_per_s:g}/s,"
        f" {ask.input_len} tokens in, {ask.output_len} out"
    )
