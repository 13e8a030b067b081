"""The differences between two reports of one benchmark. Pure.

A figure differs if the ranges of its runs do not overlap, and its medians differ by more than
`tolerance`. With one run each there is no range, so only the tolerance decides: repeat runs to tell
a change from noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.common.report import Report, Result
from engine.errors import ConfigError

LOWER_IS_BETTER = ("ms", "s", "µs", "USD")
HIGHER_IS_BETTER = ("req/s", "tok/s", "tokens/s", "1/s", "share")
FAILURES = ("requests/failed", "errors/")
OF_THE_CLIENT = ("client/", "send_lag/")  # say how far to trust a report, not how good a server is
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure of both reports. `ratio` is the second over the first; None if that is 0."""

    name: str
    unit: str
    first: float
    second: float
    ratio: float | None
    verdict: str  # better, worse, differs, or empty


def changes_of(
    first: Report, second: Report, tolerance: float = TOLERANCE
) -> tuple[FigureChange, ...]:
    """The figures that both reports have. Raises ConfigError if there are none."""
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
    """A line for each setting, and for machine and seed, in which the reports differ."""
    for name in dict.fromkeys((*first.config, *second.config)):
        a, b = first.config.get(name), second.config.get(name)
        if a != b:
            yield f"{name}: {a} and {b}"
    if first.hardware != second.hardware:
        yield f"machine: {first.hardware.cpu} and {second.hardware.cpu}"
    if first.seed != second.seed:
        yield f"seed: {first.seed} and {second.seed}"


def are_single(first: Report, second: Report) -> bool:
    """True if both have one run of each figure, so that noise cannot be told from change."""
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
