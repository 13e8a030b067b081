"""The few figures that README.md shows, each from a report in `bench/results/`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Headline:
    """One row. `peer` is the system it stands beside; without one, its limit if it has one."""

    label: str
    report: str  # name of the file, without .json
    result: str
    peer: str | None = None


HEADLINES: tuple[Headline, ...] = (
    Headline("goodput of planned pools over the best fixed split, simulated", "elastic", "ratio"),
)
