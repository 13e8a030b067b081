"""Reports as tables for people. What is printed is what the JSON holds."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.report import Report, Result

STATISTICS = ("mean", "p50", "p90", "p99")
LABELS = {
    "ttft": "TTFT",
    "itl": "ITL, between chunks",
    "tpot": "TPOT",
    "e2e": "E2E",
    "send_lag": "send lag",
    "slot_wait": "wait for a slot",
}


def print_report(console: Console, report: Report, *, title: str) -> None:
    """Where and how it was measured, then every result."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text(_provenance(report), style="dim"), soft_wrap=True)
    console.print(_tables(report.results))


def print_failures(console: Console, kinds: Mapping[str, tuple[int, str]]) -> None:
    """Each kind of failed request, how often it came, and what was said the first time."""
    for kind, (count, first) in kinds.items():
        line = f"failed: {count} × {kind}, the first: {first}"
        console.print(Text(line, style="red"), soft_wrap=True)


def print_warnings(console: Console, lines: Sequence[str]) -> None:
    """Each line, marked as a warning."""
    for line in lines:
        console.print(Text(f"note: {line}", style="yellow"), soft_wrap=True)


def _tables(results: Sequence[Result]) -> RenderableType:
    latencies = [result for result in results if _statistic(result) in STATISTICS]
    stages = [result for result in results if result.name.startswith("timeline/")]
    shown = {result.name for result in (*latencies, *stages)}
    others = [result for result in results if result.name not in shown]
    tables = [_latency_table(latencies), _plain_table(others)]
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
    """The median and, under it, the least and the greatest of runs that differ."""
    low, high = _number(min(result.runs)), _number(max(result.runs))
    median = _number(result.value)
    return median if low == high else f"{median}\n{low}..{high}"


def _number(value: float) -> str:
    if value == int(value):
        return f"{value:,.0f}"
    digits = next((n for bound, n in ((1, 3), (100, 2), (1000, 1)) if abs(value) < bound), 0)
    return f"{value:,.{digits}f}"


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
