"""`baton bench compare A B`: shows two reports of one benchmark side by side.

A figure differs between the reports if the ranges of its runs do not overlap and its medians differ
by more than `tolerance`. If each report has one run, there is no range, so only the tolerance
decides. To distinguish a change from noise, repeat the runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.common.command import printed_errors
from bench.common.report import Report, Result, from_json
from bench.common.tables import number_text, print_lines
from engine.errors import ConfigError

LOWER_IS_BETTER = ("ms", "s", "µs", "USD")
HIGHER_IS_BETTER = ("req/s", "tok/s", "tokens/s", "1/s", "share")
FAILURES = ("requests/failed", "errors/")
OF_THE_CLIENT = ("client/", "send_lag/")  # these figures describe the client, not the server
TOLERANCE = 0.05
STYLES = {"better": "green", "worse": "red", "differs": "yellow", "": None}


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure in both reports. `ratio` is the second value divided by the first; None if the
    first is 0.
    """

    name: str
    unit: str
    first: float
    second: float
    ratio: float | None
    verdict: str  # verdict: better, worse, differs, or empty


def changes_of(
    first: Report, second: Report, tolerance: float = TOLERANCE
) -> tuple[FigureChange, ...]:
    """Returns the figures that both reports have, with their values. Raises ConfigError if there
    are none.
    """
    if first.bench != second.bench:
        raise ConfigError(f"reports of {first.bench} and {second.bench} cannot be compared")
    theirs = {result.name: result for result in second.results}
    changes = tuple(
        _change(result, theirs[result.name], tolerance)
        for result in first.results
        if result.name in theirs
    )
    if not changes:
        raise ConfigError("the two reports have no figure in common")
    return changes


def settings_that_differ(first: Report, second: Report) -> Iterator[str]:
    """Returns a line for each setting that differs between the reports, including machine and
    seed.
    """
    for name in dict.fromkeys((*first.config, *second.config)):
        a, b = first.config.get(name), second.config.get(name)
        if a != b:
            yield f"{name}: {a} and {b}"
    if first.hardware != second.hardware:
        yield f"machine: {first.hardware.cpu} and {second.hardware.cpu}"
    if first.seed != second.seed:
        yield f"seed: {first.seed} and {second.seed}"


def are_single(first: Report, second: Report) -> bool:
    """Returns True if both reports have one run of each figure. Then noise cannot be distinguished
    from a change.
    """
    return all(len(result.runs) == 1 for result in (*first.results, *second.results))


def _change(first: Result, second: Result, tolerance: float) -> FigureChange:
    ratio = second.value / first.value if first.value else None
    return FigureChange(
        first.name,
        first.unit,
        first.value,
        second.value,
        ratio,
        _verdict(first, second, ratio, tolerance),
    )


def _verdict(first: Result, second: Result, ratio: float | None, tolerance: float) -> str:
    overlap = min(first.runs) <= max(second.runs) and min(second.runs) <= max(first.runs)
    near = first.value == second.value if ratio is None else abs(ratio - 1) <= tolerance
    if overlap or near:
        return ""
    rises = second.value > first.value
    if first.name.startswith(OF_THE_CLIENT) or first.name == "duration":
        return "differs"
    if first.unit in LOWER_IS_BETTER or first.name.startswith(FAILURES):
        return "worse" if rises else "better"
    if first.unit in HIGHER_IS_BETTER:
        return "better" if rises else "worse"
    return "differs"


def compare(
    a: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A report (JSON).")],
    b: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Another report.")],
    *,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative differences up to this are noise.")
    ] = TOLERANCE,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="End with status 1 if a figure is worse.")
    ] = False,
) -> None:
    """Show the figures of two reports side by side, and which of them changed."""
    with printed_errors():
        first, second = _read(a), _read(b)
        changes = changes_of(first, second, tolerance)
        console = Console()
        console.print(_table(changes))
        lines = [f"differs: {line}" for line in settings_that_differ(first, second)]
        if are_single(first, second):
            lines.append("note: one run each; --repeat shows how far runs of one server differ")
        print_lines(console, lines, style="yellow")
    if fail_if_worse and any(change.verdict == "worse" for change in changes):
        raise typer.Exit(1)


def _read(path: Path) -> Report:
    try:
        return from_json(path.read_bytes())
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no report: {error}") from error


def _table(changes: tuple[FigureChange, ...]) -> Table:
    table = Table("figure", "A", "B", "B/A", "unit", "", box=box.SIMPLE_HEAD)
    for change in changes:
        table.add_row(
            change.name,
            number_text(change.first),
            number_text(change.second),
            "" if change.ratio is None else f"{change.ratio:.3f}",
            change.unit,
            change.verdict,
            style=STYLES[change.verdict],
        )
    return table
