"""The command `baton bench eviction`: its options, its table and its plot.

baton bench eviction --trace conversation_trace.jsonl --json eviction.json --plot eviction.png
"""

from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from bench.common.command import (
    JsonOption,
    PlotOption,
    SeedOption,
    numbers_of,
    printed_errors,
    publish,
    quick_option,
)
from bench.common.machine import report_here
from bench.common.plots import require_matplotlib, save_figure
from bench.common.progress import say_on_stderr
from bench.common.report import Report
from bench.eviction.study import StudyPlan, halfway_lines, study
from bench.eviction.turns import drawn_turns, turns_of
from bench.simulator.traces import read_trace

QUICK_REQUESTS, QUICK_SESSIONS, QUICK_SIZES = 1500, 400, (1000, 4000)
SESSIONS_PER_S = 1.0
DRAWN_PART = 8  # the drawn load is that much smaller than a recorded one, and so are its caches
CURVES = ("leaf_lru", "leaf_arc", "worth", "ids", "noisy", "exact")


def eviction(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="A trace in Mooncake's format; else only a drawn load.")
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="BLOCKS,…", help="Sizes of the cache, in blocks; an eighth for the drawn load."
        ),
    ] = "2000,6000,18000,54000",
    seed: SeedOption = 0,
    quick: Annotated[bool, quick_option("Few requests and two small sizes.")] = False,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Compare what policies of eviction keep, with hints of clients and without."""
    with printed_errors():
        if plot is not None:
            require_matplotlib()
        num_sessions = QUICK_SESSIONS if quick else 4 * QUICK_SESSIONS
        loads = {"drawn": drawn_turns(num_sessions, SESSIONS_PER_S, Random(seed))}
        if trace is not None:
            turns = turns_of(read_trace(trace))
            loads = {"trace": turns[:QUICK_REQUESTS] if quick else turns, **loads}
        given = QUICK_SIZES if quick else numbers_of("--sizes", sizes)
        small = tuple(size // DRAWN_PART or 1 for size in given)
        plan = StudyPlan(loads, {"trace": given, "drawn": small}, seed)
        results = study(plan, say_on_stderr())
        config = {
            "trace": None if trace is None else trace.name,
            "trace_requests": len(loads.get("trace", ())),
            "drawn_sessions": num_sessions,
            "drawn_requests": len(loads["drawn"]),
        }
        report = report_here("eviction", seed=seed, config=config, results=results)
        publish(report, json, title="hits of the store's eviction", warnings=halfway_lines(results))
        if plot is not None:
            _plot(report, plot)


def _plot(report: Report, path: Path) -> None:
    """Draws hits over size: a panel for each load, a curve for each policy."""
    from matplotlib.figure import Figure

    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for result in report.results:
        load, _, rest = result.name.partition("/")
        size, _, which = rest.partition("/")
        if which in CURVES:
            curves[load][which].append((int(size), result.value))
        if which == "worth":
            for peer, theirs in result.peers.items():
                curves[load][peer].append((int(size), theirs.value))
            curves[load]["Belady"].append((int(size), result.limit or 0.0))
    figure = Figure(figsize=(6 * len(curves), 4.5), layout="constrained")
    for axis, (load, lines) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for place, (which, points) in enumerate(lines.items()):
            style, colour = "-" if which in CURVES else "--", f"C{place % 10}"
            marker = "." if place < 10 else "x"
            axis.plot(*zip(*points, strict=True), style, marker=marker, color=colour, label=which)
        axis.set(xscale="log", xlabel="blocks of the cache", ylabel="hits (%)", title=load)
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    save_figure(figure, path, title="hits of the store's eviction")
