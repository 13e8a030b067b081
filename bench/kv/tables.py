"""Prints the report of `bench kv` as tables, which hold what the JSON holds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from bench.common.report import Report, Result
from bench.common.tables import print_pivot


def print_kv(console: Console, report: Report, *, title: str) -> None:
    """Prints the head, bandwidths beside limits and peers, latencies and handoffs."""
    speeds = [result for result in report.results if result.unit == "GiB/s"]
    latencies = [result for result in report.results if result.unit == "µs"]
    shown = {result.name for result in (*speeds, *latencies)}
    others = tuple(result for result in report.results if result.name not in shown)
    print_pivot(console, replace(report, results=tuple(map(_flat, speeds))), title=title)
    limited = [result for result in speeds if result.limit is not None or result.peers]
    if limited:
        console.print(_beside_table(limited))
    if latencies:
        console.print(_latency_table(latencies))
    if others:
        console.print(_plain_table(others))


def _flat(result: Result) -> Result:
    """Renames shm/64KiB/16 to shm/64KiB_×_16 for a row a case, and keeps only the median."""
    mover, _, case = result.name.partition("/")
    return replace(result, name=f"{mover}/{case.replace('/', '_×_')}", runs=(result.value,))


def _beside_table(results: Sequence[Result]) -> Table:
    peers = list(dict.fromkeys(peer for result in results for peer in result.peers))
    headers = [text for peer in peers for text in (peer, "× peer")]
    table = _table("GiB/s", "value", "least", "greatest", "limit", "of it", *headers)
    for result in results:
        beside = [text for peer in peers for text in _peer(result, peer)]
        limit = "" if result.limit is None else f"{result.limit:.2f}"
        of_limit = "" if result.of_limit is None else f"{result.of_limit:.0%}"
        spread = (result.value, min(result.runs), max(result.runs))
        values = (f"{value:.2f}" for value in spread)
        table.add_row(result.name, *values, limit, of_limit, *beside)
    return table


def _peer(result: Result, name: str) -> tuple[str, str]:
    peer = result.peers.get(name)
    return ("", "") if peer is None else (f"{peer.value:.2f}", f"{peer.ratio:.2f}")


def _latency_table(results: Sequence[Result]) -> Table:
    """Latencies of one block: a row for each size, a column for each mover and peer."""
    sizes = _distinct(results, lambda result: result.name.split("/")[1])
    movers = _distinct(results, lambda result: result.name.split("/")[0])
    peers = list(dict.fromkeys(peer for result in results for peer in result.peers))
    cells = {tuple(result.name.split("/")[:2]): f"{result.value:.0f}" for result in results}
    for result in results:
        size = result.name.split("/")[1]
        cells |= {(name, size): f"{peer.value:.0f}" for name, peer in result.peers.items()}
    table = _table("one block, µs", *movers, *peers)
    for size in sizes:
        table.add_row(size, *(cells.get((mover, size), "") for mover in (*movers, *peers)))
    return table


def _plain_table(results: Iterable[Result]) -> Table:
    table = _table("result", "value", "spread", "unit")
    for result in results:
        spread = f"{min(result.runs):.3g}..{max(result.runs):.3g}"
        table.add_row(result.name, f"{result.value:.3g}", spread, result.unit)
    return table


def _distinct(results: Sequence[Result], part: Callable[[Result], str]) -> list[str]:
    return list(dict.fromkeys(map(part, results)))


def _table(first: str, *others: str) -> Table:
    table = Table(first, *others, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table
