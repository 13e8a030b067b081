"""`baton bench compare A B`: its arguments, and the table that it prints."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.common.command import printed_errors
from bench.common.report import Report, from_json
from bench.common.tables import number_text, print_lines
from bench.compare.differences import (
    TOLERANCE,
    FigureChange,
    are_single,
    changes_of,
    settings_that_differ,
)
from engine.errors import ConfigError

STYLES = {"better": "green", "worse": "red", "differs": "yellow", "": None}


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
