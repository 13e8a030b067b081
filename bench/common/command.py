"""Code that the commands of all benchmarks share: options, lists of values, progress lines, errors,
the report's file.

Options are types for the parameters of a typer command:

    def engine(*, repeat: RepeatOption = 5, seed: SeedOption = 0, json: JsonOption = None) -> None:
        with printed_errors():
            ...
            publish(report, json, title="…")
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from bench.common.report import Report, to_json
from bench.common.tables import print_head, print_lines, print_results
from bench.processes.driven import END_SIGNALS, DrivenFailed
from engine.errors import BatonError, ConfigError

Say = Callable[[str], None]


def say_nothing(line: str) -> None:
    """Ignores the line. For callers that do not print progress."""


def say_on_stderr() -> Say:
    """Returns a function that prints each line dimmed on stderr."""
    console = Console(stderr=True)
    return lambda line: console.print(line, style="dim")


T = TypeVar("T")

JsonOption = Annotated[Path | None, typer.Option(help="Write the report here.")]
PlotOption = Annotated[Path | None, typer.Option(help="Draw the report here (PNG).")]
SeedOption = Annotated[int, typer.Option(help="Seed of all that is random.")]
RepeatOption = Annotated[int, typer.Option(min=1, help="Runs; results are their medians.")]


def quick_option(help_text: str) -> Any:
    """Returns the option `--quick`, for a boolean parameter of any name."""
    return typer.Option("--quick", help=help_text)


def peer_option(*names: str) -> Any:
    """Returns the option `--peer`. It may be given once for each of these peers."""
    return typer.Option(
        metavar="NAME=PYTHON",
        help=f"Also measure {' or '.join(names)}, run by that Python; repeatable.",
    )


def values_of(option: str, text: str, parse: Callable[[str], T], form: str) -> tuple[T, ...]:
    """Returns the comma-separated values of `text`, without duplicates.

    `form` names the expected form ("a list of numbers"). If `parse` raises ValueError, this raises
    a ConfigError that names `option`.
    """
    try:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",") if part))
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is not {form}") from error


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """Returns the comma-separated integers of `text`. Raises ConfigError."""
    return values_of(option, text, int, "a list of numbers")


def publish(
    report: Report,
    path: Path | None,
    *,
    title: str,
    show: Callable[[Console, Report], None] = print_results,
    warnings: Iterable[str] = (),
) -> None:
    """Prints the report with its warnings. If `--json` has a path, also writes the report as
    JSON.
    """
    console = Console()
    print_head(console, report, title=title)
    show(console, report)
    print_lines(console, [f"note: {line}" for line in warnings], style="yellow")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_json(report))


@contextmanager
def printed_errors() -> Iterator[None]:
    """Handles errors that the user can correct: prints the error and ends the command with status
    1.

    On a signal, the command prints one line and ends with that signal's status.
    """
    try:
        yield
    except (BatonError, OSError) as error:
        last_lines = error.last_lines if isinstance(error, DrivenFailed) else ()
        typer.echo("\n".join([f"error: {error}", *last_lines]), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo(f"ended by {END_SIGNALS.last.name}", err=True)
        raise typer.Exit(END_SIGNALS.exit_status) from error


def splits_of(text: str) -> tuple[tuple[int, int], ...]:
    """Returns the (prefill, decode) pairs in a text such as "1+1,2+2". Raises ConfigError."""
    splits = values_of("--splits", text, _split, "PREFILL+DECODE,…")
    if not splits or min(map(min, splits)) < 1:
        raise ConfigError("--splits: workers of both roles are needed")
    return splits


def _split(text: str) -> tuple[int, int]:
    prefill, decode = text.split("+")
    return int(prefill), int(decode)
