"""The report of `bench speculate` as tables: what is measured and, in brackets, expected."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.common.report import Report, Result
from bench.common.tables import print_head
from bench.speculate.plan import GOALS

COLUMNS = {  # results by their header
    "per s": "decode",
    "speed-up": "speedup",
    "(pred.)": "predicted",
    "a pass": "tokens_per_pass",
    "(exp.)": "expected_per_pass",
    "drafted": "drafted",
    "α": "mean_acceptance",
}


def print_speculation(console: Console, report: Report, *, title: str) -> None:
    """Prints the provenance, the promises, every cell, and acceptance by place."""
    print_head(console, report, title=title)
    console.print(_promises([result for result in report.results if result.name in GOALS]))
    by_name = {result.name: result for result in report.results}
    console.print(_cells(by_name))
    console.print(_places(by_name))


def _promises(results: Sequence[Result]) -> Table:
    table = Table("lowest", "value", "runs", "promised", "", box=box.SIMPLE_HEAD)
    for column in table.columns[1:4]:
        column.justify = "right"
    for result in results:
        assert result.limit is not None
        kept = "" if result.value >= result.limit else "missed"
        low, high = min(result.runs), max(result.runs)
        spread = f"{low:.3f}..{high:.3f}" if low != high else ""
        table.add_row(result.name, f"{result.value:.3f}", spread, f"{result.limit:g}", kept)
    return table


def _cells(by_name: Mapping[str, Result]) -> Table:
    table = _narrow("tokens", *COLUMNS)
    headed: set[str] = set()
    for name in by_name:
        thing, _, cell = name.partition("/")
        if thing != COLUMNS["per s"]:
            continue
        workload, _, mode = cell.partition("/")
        if workload not in headed:
            headed.add(workload)
            table.add_section()
            table.add_row(workload)
        found = [by_name.get(f"{column}/{cell}") for column in COLUMNS.values()]
        table.add_row(f"  {mode}", *("" if r is None else _number(r.value) for r in found))
    return table


def _places(by_name: Mapping[str, Result]) -> Table:
    """Under each share, the one that was expected; in per cent."""
    rows: dict[str, list[str]] = {}
    for name, result in by_name.items():
        thing, _, place = name.partition("/")
        if thing == "acceptance":
            expected = by_name[f"expected_{name}"]
            cells = rows.setdefault(place.rpartition("_")[0], [])
            cells.append(f"{100 * result.value:.0f}\n({100 * expected.value:.0f})")
    num_places = max(map(len, rows.values()), default=0)
    table = _narrow("% accepted in place", *map(str, range(1, num_places + 1)))
    for drafter, cells in rows.items():
        table.add_row(drafter, *cells)
    return table


def _narrow(*headers: str) -> Table:
    table = Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
