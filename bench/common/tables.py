"""Prints reports as tables, with the same content as the JSON."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bench.common.report import NO_GOALS, Goals, Report, Result

STATISTICS = ("mean", "p50", "p90", "p99")
MOST_COLUMNS = 1000  # widest table in characters


def number_text(value: float) -> str:
    """Formats a number with about three digits: 1,234, 12.30, 0.123; very small numbers
    as 1.2e-05.
    """
    if value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return f"{value:.3g}"
    digits = next((n for bound, n in ((1, 3), (100, 2), (1000, 1)) if abs(value) < bound), 0)
    return f"{value:,.{digits}f}"


def print_head(console: Console, report: Report, *, title: str) -> None:
    """Prints the title, and the machine, date and settings of the measurement."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text(_provenance(report), style="dim"), soft_wrap=True)


def print_results(console: Console, report: Report, goals: Goals = NO_GOALS) -> None:
    """Prints the latencies with a column for each statistic, then every other result in its own
    row.
    """
    latencies, others = latencies_and_others(report.results)
    if latencies:
        _print(console, _grid(latencies, _thing_and_statistic))
    if others:
        _print(console, _list(others, goals))


def latencies_and_others(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Returns two lists: results named `thing/statistic` (latencies), and other results."""
    latencies = [one for one in results if one.name.rpartition("/")[2] in STATISTICS]
    return latencies, [one for one in results if one not in latencies]


def statistics_of(latencies: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Returns headings and rows of cells, with a row for each thing and a column for each
    statistic.
    """
    return _cells(latencies, _thing_and_statistic)


def print_pivot(console: Console, report: Report) -> None:
    """Prints results named `thing/setting`, with a row for each setting and a column for each
    thing.
    """
    _print(console, _grid(report.results, _setting_and_thing))


def print_lines(console: Console, lines: Sequence[str], *, style: str = "") -> None:
    """Prints each line in the given style."""
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def _thing_and_statistic(result: Result) -> tuple[str, str]:
    thing, _, statistic = result.name.rpartition("/")
    return f"{thing}, {result.unit}" if result.unit else thing, statistic


def _setting_and_thing(result: Result) -> tuple[str, str]:
    thing, _, setting = result.name.partition("/")
    return setting, f"{thing}_{result.unit}".replace("_", "\n").rstrip()


def columns_of(results: Sequence[Result], goals: Goals = NO_GOALS) -> dict[str, list[str]]:
    """Returns cells by heading, with a cell for each result. Empty columns are left out."""
    peers = dict.fromkeys(peer for result in results for peer in result.peers)
    columns = {
        "result": [result.name for result in results],
        "value": [number_text(result.value) for result in results],
        "unit": [result.unit for result in results],
        "least … most": [_spread(result) for result in results],
        "limit": [_number(result.limit) for result in results],
        "of limit": ["" if r.of_limit is None else f"{r.of_limit:.0%}" for r in results],
        "goal": [_number(goals.bound(result.name)) for result in results],
        "met": [_MET[goals.is_met(result)] for result in results],
    }
    for peer in peers:
        theirs = [result.peers.get(peer) for result in results]
        columns[peer] = ["" if one is None else number_text(one.value) for one in theirs]
        columns[f"× {peer}"] = ["" if one is None else f"{one.ratio:.2f}" for one in theirs]
    return {heading: cells for heading, cells in columns.items() if any(cells)}


def _list(results: Sequence[Result], goals: Goals) -> Table:
    columns = columns_of(results, goals)
    return _table(list(columns), list(zip(*columns.values(), strict=True)))


def _grid(results: Sequence[Result], place: Callable[[Result], tuple[str, str]]) -> Table:
    return _table(*_cells(results, place))


def _cells(
    results: Sequence[Result], place: Callable[[Result], tuple[str, str]]
) -> tuple[list[str], list[list[str]]]:
    """Returns headings and rows. `place` returns the row and the column of a result."""
    cells = {place(result): _value(result) for result in results}
    rows, columns = (dict.fromkeys(names) for names in zip(*cells, strict=True))
    return ["", *columns], [[row, *(cells.get((row, c), "") for c in columns)] for row in rows]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _print(console: Console, table: Table) -> None:
    """Prints a table at full width, because a cut number is worse than a long line."""
    unbounded = console.options.update(width=MOST_COLUMNS)
    table.width = Measurement.get(console, unbounded, table).maximum
    console.print(table, crop=False)


_MET = {None: "", True: "yes", False: "no"}


def _number(value: float | None) -> str:
    return "" if value is None else number_text(value)


def _value(result: Result) -> str:
    """Returns the median, and below it the range of the runs if they differ."""
    return f"{number_text(result.value)}\n{_spread(result)}".rstrip()


def _spread(result: Result) -> str:
    """Returns the range of the runs; empty if they are equal."""
    least, most = number_text(min(result.runs)), number_text(max(result.runs))
    return "" if least == most else f"{least} … {most}"


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
