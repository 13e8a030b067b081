"""How a benchmark reports its progress: one line at a time, on stderr."""

from collections.abc import Callable

from rich.console import Console

Say = Callable[[str], None]


def say_nothing(line: str) -> None:
    """Ignores the line: for callers that want no progress reports."""


def say_on_stderr() -> Say:
    """Returns a function that prints each line dimmed on stderr."""
    console = Console(stderr=True)
    return lambda line: console.print(line, style="dim")
