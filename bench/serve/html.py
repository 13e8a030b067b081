"""Renders a load as one self-contained HTML page: figures, plots, and the slowest requests. Pure.

The page has no script and loads no other files. Texts from outside, such as errors, are escaped.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from bench.client.answers import Answer
from bench.client.load import MEASURES, LoadRun, RequestOutcome, SloBounds
from bench.common.plots import (
    PANEL_INCHES,
    RequestSpan,
    draw_cdf,
    draw_panels,
    drawn_svg,
    panels_of,
)
from bench.common.report import Report
from bench.common.tables import columns_of, latencies_and_others, statistics_of
from bench.serve.records import GOAL, HIGHEST, SHARE_AT

STYLE = """
:root { color-scheme: light dark; --note: #8f4700; --line: #8886 }
@media (prefers-color-scheme: dark) { :root { --note: #ffb35c } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { margin-top: 2.5rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
td, th { padding: 2px 0 2px 14px; text-align: right; vertical-align: top; white-space: pre }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
th, td { border-bottom: 1px solid var(--line) }
.tables { display: flex; flex-wrap: wrap; gap: 1rem 4rem; align-items: flex-start }
.tables table, figure { max-width: 100%; overflow-x: auto }
figure { margin: 1rem 0 } svg { max-width: 100% }
figure svg { width: 100%; height: auto }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
.wait { fill: #999 } .first { fill: #e69f00 } .rest { fill: #56b4e9 }
.legend span { margin-right: 1em; white-space: nowrap }
.slow { margin: .6rem 0 } .slow small { opacity: .8 }
.legend i { display: inline-block; width: 1em; height: .7em; margin-right: .4em }
.tick { stroke: #222; stroke-width: .5; opacity: .5 } .note { color: var(--note) }
"""


def spans_of(run: LoadRun) -> list[RequestSpan]:
    """Returns the times of the run's requests, on the run's clock. A failed request ends when it
    begins.
    """
    return [_span(one) for one in run.outcomes]


def _span(one: RequestOutcome) -> RequestSpan:
    result = one.result
    sent_s = one.due_s + one.delay_s
    if not isinstance(result, Answer):
        return RequestSpan(one.due_s, None, sent_s, 0)
    return RequestSpan(
        one.due_s, sent_s + result.ttft_s, sent_s + result.e2e_s, result.num_output_tokens
    )


def page_of(
    report: Report,
    runs: Sequence[LoadRun],
    slo: SloBounds | None,
    *,
    title: str,
    warnings: Sequence[str],
) -> str:
    """Returns the page as HTML. Plots and timelines show the last run."""
    slo = slo or SloBounds()
    run = runs[-1]
    which = f" of the last of {len(runs)} runs" if len(runs) > 1 else ""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(report.command)}</pre>",
        f"<p>{escape(_provenance(report))}</p>",
        *(f'<p class="note">note: {escape(line)}</p>' for line in warnings),
        "<h2>Figures</h2>",
        f'<div class="tables">{"".join(_tables(report))}</div>',
        *_sweep(report),
        f"<h2>Over time{which}</h2>",
        _over_time(run, slo),
        f"<h2>Distributions{which}</h2>",
        _distributions(run, slo),
        f"<h2>The slowest {NUM_SLOWEST} requests{which}</h2>",
        *timelines_of(run),
        "<h2>Settings</h2>",
        _table([], [[k, str(v)] for k, v in report.config.items() if v is not None]),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _sweep(report: Report) -> list[str]:
    """Returns HTML with the share of requests within the bounds by rate, if the load was a
    sweep.
    """
    shares = {
        float(one.name.removeprefix(SHARE_AT)): one.value
        for one in report.results
        if one.name.startswith(SHARE_AT)
    }
    if not shares:
        return []
    goal, highest = report.config.get(GOAL), report.value(HIGHEST)

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        axis.plot([*shares], [*shares.values()], "o-", markersize=4, label="rate that was tried")
        if isinstance(goal, float):
            axis.axhline(goal, color="tab:red", linestyle="--", label="goal")
        if highest is not None:
            axis.axvline(highest, color="tab:green", linestyle=":", label="highest that passed")
        axis.set(xlabel="requests/s", ylabel="share within bounds", ylim=(0, 1.05))
        axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axis.grid(alpha=0.3)

    return ["<h2>Sweep</h2>", f"<figure>{drawn_svg(draw, 11, 2.6)}</figure>"]


def _over_time(run: LoadRun, slo: SloBounds) -> str:
    panels = panels_of(spans_of(run), bound_ttft_ms=_ms(slo.ttft_s), bound_tpot_ms=_ms(slo.tpot_s))
    svg = drawn_svg(partial(draw_panels, panels=panels), 11, PANEL_INCHES * len(panels))
    return f"<figure>{svg}</figure>"


def _distributions(run: LoadRun, slo: SloBounds) -> str:
    samples = {
        "TTFT from due time": (
            [(answer.ttft_s + one.delay_s) * 1e3 for one, answer in run.answered],
            slo.ttft_s,
        ),
        "TTFT from sending": ([answer.ttft_s * 1e3 for answer in run.answers], slo.ttft_s),
        "TPOT": ([a.tpot_s * 1e3 for a in run.answers if a.tpot_s is not None], slo.tpot_s),
    }

    samples = {name: one for name, one in samples.items() if one[0]}
    if not samples:
        return "<p>No request was answered.</p>"

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(samples), squeeze=False)[0]
        for axis, (name, (values_ms, bound_s)) in zip(axes, samples.items(), strict=True):
            draw_cdf(axis, name, values_ms, bound=_ms(bound_s))

    return f"<figure>{drawn_svg(draw, 11, 3.2)}</figure>"


def _tables(report: Report) -> list[str]:
    """Returns HTML tables: latencies with a column for each statistic, and the other figures."""
    latencies, others = latencies_and_others(report.results)
    columns = columns_of(others)
    rows = [[*row] for row in zip(*columns.values(), strict=True)]
    return [
        *([_table(*statistics_of(latencies))] if latencies else []),
        *([_table([*columns], rows)] if others else []),
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return (
        f"<table>{f'<tr>{head}</tr>' if headings else ''}"
        f"{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    )


def _provenance(report: Report) -> str:
    facts = [
        report.date,
        f"commit {report.commit or 'unknown'}",
        report.hardware.cpu or "unknown CPU",
        f"{report.hardware.num_cores} cores",
        f"seed {report.seed}",
    ]
    return " · ".join(facts)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3


# ---------------------------------------------------------------- bars of the slowest requests

NUM_SLOWEST = 20
BAR_WIDTH = 1040
MOST_TICKS = 400  # most ticks of chunks in one bar
WAIT, FIRST, REST = (f'class="{name}" height="16"' for name in ("wait", "first", "rest"))
STAGE_COLOURS = ("#0072b2", "#cc79a7", "#f0e442", "#009e73", "#d55e00", "#8c6bb1", "#7fbf3f")


def slowest_of(run: LoadRun) -> list[tuple[RequestOutcome, Answer]]:
    """Returns the answers that took longest from their due time to their end, the slowest first."""
    ordered = sorted(run.answered, key=lambda pair: -(pair[0].delay_s + pair[1].e2e_s))
    return ordered[:NUM_SLOWEST]


def timelines_of(run: LoadRun) -> list[str]:
    """Returns HTML with a legend, and a bar for each of the slowest requests."""
    slowest = slowest_of(run)
    if not slowest:
        return ["<p>No request was answered.</p>"]
    one, answer = slowest[0]
    longest_s = (one.delay_s + answer.e2e_s) or 1.0
    stages = dict.fromkeys(name for _, answer in slowest for name in _stages(answer))
    colours = {name: STAGE_COLOURS[n % len(STAGE_COLOURS)] for n, name in enumerate(stages)}
    bars = (_bar(one, answer, BAR_WIDTH / longest_s, colours) for one, answer in slowest)
    return [_legend(colours), *bars]


def _legend(colours: Mapping[str, str]) -> str:
    """Returns HTML that explains the colours of the bars."""
    own = {
        "from the due time to sending": "#999",
        "until the first token": "#e69f00",
        "until the last token, with a mark for each chunk": "#56b4e9",
    }
    told = f"<br>The thin bar has the server's own stages: {_named(colours)}" if colours else ""
    return f'<p class="legend">{_named(own)}{told}</p>'


def _named(colours: Mapping[str, str]) -> str:
    keys = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return " ".join(keys)


def _stages(answer: Answer) -> dict[str, float]:
    """Returns the consecutive stages of the server. Durations that overlap with stages are left
    out.
    """
    return {name: value for name, value in answer.timeline_s.items() if name not in MEASURES}


def _bar(one: RequestOutcome, answer: Answer, per_s: float, colours: Mapping[str, str]) -> str:
    wait, first = one.delay_s * per_s, answer.ttft_s * per_s
    rest = (answer.e2e_s - answer.ttft_s) * per_s
    times_s = answer.chunk_times_s[:: len(answer.chunk_times_s) // MOST_TICKS + 1]
    ticks = "".join(
        f'<path class="tick" d="M{wait + (at_s - answer.sent_s) * per_s:.1f} 0v16"/>'
        for at_s in times_s
    )
    stages, at = [], wait
    for name, value in _stages(answer).items():
        stages.append(_box(at, value * per_s, f'y="18" height="6" fill="{colours[name]}"'))
        at += value * per_s
    listed = " · ".join(f"{name} {value * 1e3:.1f} ms" for name, value in answer.timeline_s.items())
    told = (
        f"session {one.session}, turn {one.turn}, due at {one.due_s:.2f} s: waited"
        f" {one.delay_s * 1e3:.1f} ms, TTFT {answer.ttft_s * 1e3:.1f} ms,"
        f" E2E {answer.e2e_s * 1e3:.1f} ms, {answer.num_output_tokens} tokens"
    )
    return (
        f'<div class="slow">{escape(told)}<br><svg width="{BAR_WIDTH}"'
        f' height="{24 if stages else 16}" role="img" aria-label="{escape(told)}">'
        f"{_box(0, wait, WAIT)}{_box(wait, first, FIRST)}{_box(wait + first, rest, REST)}"
        f"{ticks}{''.join(stages)}</svg><br><small>{escape(listed)}</small></div>"
    )


def _box(x: float, width: float, style: str) -> str:
    return f'<rect x="{x:.1f}" width="{width:.1f}" {style}/>'
