"""Prints reports as tables. A table holds what the JSON holds."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.common.report import Peer, Report, Result

STATISTICS = ("mean", "p50", "p90", "p99")
RATES = {"compute": "GFLOP/s", "bandwidth": "GB/s"}
LABELS = {
    "ttft": "TTFT",
    "itl": "ITL, between chunks",
    "tpot": "TPOT",
    "e2e": "E2E",
    "send_lag": "send lag",
    "slot_wait": "wait for a slot",
}


def number_text(value: float) -> str:
    """A number with some three digits: 1,234, 12.30, 0.123; 1.2e-05 if it is very small."""
    if value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return f"{value:.3g}"
    digits = next((n for bound, n in ((1, 3), (100, 2), (1000, 1)) if abs(value) < bound), 0)
    return f"{value:,.{digits}f}"


def print_head(console: Console, report: Report, *, title: str) -> None:
    """Prints the title, and where and how the report was measured."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text(_provenance(report), style="dim"), soft_wrap=True)


def print_report(console: Console, report: Report, *, title: str) -> None:
    """Prints the head, then every result."""
    print_head(console, report, title=title)
    console.print(_tables(report.results))


def print_speeds(console: Console, report: Report, *, title: str) -> None:
    """Prints the head, the speeds beside limits and peers, then all other results."""
    speeds = [result for result in report.results if result.unit == "tokens/s"]
    beside = {_beside(speed, kind) for speed in speeds for kind in RATES}
    shown = beside | {speed.name for speed in speeds}
    print_head(console, report, title=title)
    console.print(_speed_table(speeds, {result.name: result for result in report.results}))
    if any(speed.peers for speed in speeds):
        console.print(_peer_table([speed for speed in speeds if speed.peers]))
    console.print(_plain_table([r for r in report.results if r.name not in shown]))


def print_pivot(console: Console, report: Report, *, title: str) -> None:
    """Prints the head, then results `thing/setting` with a row a setting and a column a thing."""
    things = {_thing(result): result.unit for result in report.results}
    headers = [f"{thing}_{unit}".replace("_", "\n").rstrip() for thing, unit in things.items()]
    table = Table("", *headers, box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    cells = {result.name: _value(result) for result in report.results}
    for setting in dict.fromkeys(_statistic(result) for result in report.results):
        row = [cells.get(f"{thing}/{setting}", "") for thing in things]
        table.add_row(setting.replace("_", " "), *row)
    print_head(console, report, title=title)
    console.print(table)


def print_spread(console: Console, results: Sequence[Result]) -> None:
    """Prints every result with the least and the greatest of its runs."""
    table = Table("result", "value", "least", "most", "unit", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        values = (result.value, min(result.runs), max(result.runs))
        table.add_row(result.name, *(f"{value:.4g}" for value in values), result.unit)
    console.print(table)


def print_failures(console: Console, kinds: Mapping[str, tuple[int, str]]) -> None:
    """Prints each kind of failure with its count and the detail of its first example."""
    for kind, (count, first) in kinds.items():
        line = f"failed: {count} × {kind}, the first: {first}"
        console.print(Text(line, style="red"), soft_wrap=True)


def print_warnings(console: Console, lines: Sequence[str]) -> None:
    """Prints each line, marked as a warning."""
    for line in lines:
        console.print(Text(f"note: {line}", style="yellow"), soft_wrap=True)


def _tables(results: Sequence[Result]) -> RenderableType:
    latencies = [result for result in results if _statistic(result) in STATISTICS]
    stages = [result for result in results if result.name.startswith("timeline/")]
    shown = {result.name for result in (*latencies, *stages)}
    others = [result for result in results if result.name not in shown]
    tables = [_latency_table(latencies)] if latencies else []
    tables.append(_plain_table(others))
    if stages:
        tables.append(_stage_table(stages))
    return Group(*tables)


def _latency_table(results: Sequence[Result]) -> Table:
    table = Table("ms", *STATISTICS, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    cells = {result.name: _value(result) for result in results}
    for name in dict.fromkeys(_thing(result) for result in results):
        row = [cells.get(f"{name}/{statistic}", "") for statistic in STATISTICS]
        table.add_row(LABELS.get(name, name), *row)
    return table


def _speed_table(speeds: Sequence[Result], by_name: Mapping[str, Result]) -> Table:
    table = Table("tokens/s", "value", "limit", "of it", *RATES.values(), box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for speed in speeds:
        rates = (by_name.get(_beside(speed, kind)) for kind in RATES)
        table.add_row(
            speed.name,
            _value(speed),
            "" if speed.limit is None else number_text(speed.limit),
            "" if speed.of_limit is None else f"{speed.of_limit:.0%}",
            *("" if rate is None else number_text(rate.value) for rate in rates),
        )
    return table


def _peer_table(speeds: Sequence[Result]) -> Table:
    peers = list(dict.fromkeys(peer for speed in speeds for peer in speed.peers))
    headers = [peer.replace("_", "\n", 1) for peer in peers]
    table = Table("tokens/s", "ours", *headers, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for speed in speeds:
        cells = [_peer(speed.peers.get(peer)) for peer in peers]
        table.add_row(speed.name, number_text(speed.value), *cells)
    return table


def _peer(peer: Peer | None) -> str:
    """A peer's figure and, below it, the ratio of ours to it."""
    return "" if peer is None else f"{number_text(peer.value)}\n× {peer.ratio:.2f}"


def _beside(speed: Result, kind: str) -> str:
    """Name of the result that holds the job's rate of compute or bandwidth."""
    return f"{_thing(speed)}_{kind}/{_statistic(speed)}"


def _plain_table(results: Sequence[Result]) -> Table:
    table = Table("result", "value", "unit", box=box.SIMPLE_HEAD)
    table.columns[1].justify = "right"
    for result in results:
        table.add_row(result.name, _value(result), result.unit)
    return table


def _stage_table(results: Sequence[Result]) -> Table:
    table = Table("stage at the gateway", "mean", "unit", box=box.SIMPLE_HEAD)
    table.columns[1].justify = "right"
    for result in results:
        table.add_row(_statistic(result), _value(result), result.unit)
    return table


def _value(result: Result) -> str:
    """The median and, below it, the range of the runs if they differ."""
    low, high = number_text(min(result.runs)), number_text(max(result.runs))
    median = number_text(result.value)
    return median if low == high else f"{median}\n{low}..{high}"


def _thing(result: Result) -> str:
    return result.name.rpartition("/")[0]


def _statistic(result: Result) -> str:
    return result.name.rpartition("/")[2]


def _provenance(report: Report) -> str:
    hardware = report.hardware
    facts = [
        f"commit {report.commit or 'unknown'}",
        hardware.cpu or "unknown CPU",
        f"{hardware.num_cores} cores",
        *hardware.gpus,
        f"Python {hardware.python}",
        f"seed {report.seed}",
    ]
    return " · ".join(facts)
