"""The shape in which every benchmark reports, as JSON and in memory. Pure.

    {"bench", "command", "date", "commit", "hardware", "seed", "config",
     "results": [{"name", "value", "unit", "runs", "limit", "of_limit",
                  "peers": {"vllm": {"value", "ratio"}}}]}

`runs` has one figure for each repetition that defines it; `value` is their median. `limit` is what
the machine allowed, measured in the same run; `of_limit` is the share of it that was reached. Where
each repetition has a limit of its own, both are medians.
Names are `thing/statistic`: `ttft/p50`, `throughput/output_tokens`.
`bench.common.machine.report_here` makes a report.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one run."""

    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Another system's figure on the same inputs; `ratio` is ours over theirs."""

    value: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Result:
    """One named figure over all runs."""

    name: str
    value: float
    unit: str
    runs: tuple[float, ...]
    limit: float | None = None
    of_limit: float | None = None
    peers: Mapping[str, Peer] = field(default_factory=dict)

    def limited(self, limit: float) -> "Result":
        """Returns this result with its limit: the most that the machine allows."""
        return replace(self, limit=limit, of_limit=self.value / limit)

    def limited_each(self, limits: Sequence[float]) -> "Result":
        """Returns this result with a limit for each run; the report has the medians of limits
        and shares.
        """
        shares = [value / limit for value, limit in zip(self.runs, limits, strict=True)]
        return replace(self, limit=statistics.median(limits), of_limit=statistics.median(shares))

    def beside(self, theirs: Mapping[str, float]) -> "Result":
        """Returns this result with other systems' figures on the same inputs."""
        peers = {name: Peer(value, self.value / value) for name, value in theirs.items()}
        return replace(self, peers=peers)


@dataclass(frozen=True, slots=True)
class Missing:
    """A part of a plan that could not be measured."""

    name: str
    reason: str

    @property
    def told(self) -> str:
        """Returns the warning about the missing part."""
        return f"{self.name} was not measured: {self.reason}"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine that ran the benchmark (a server under test may be elsewhere)."""

    cpu: str | None
    num_cores: int
    memory_bytes: int | None
    gpus: tuple[str, ...]
    python: str


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run of a benchmark, and what is needed to repeat it."""

    bench: str
    command: str  # in the form that a user types
    date: str  # end of the run, UTC, ISO 8601: 2026-01-31T12:00:00+00:00
    commit: str | None  # None outside a repository
    hardware: Hardware
    seed: int
    config: Mapping[str, Scalar]
    results: tuple[Result, ...]

    def value(self, name: str) -> float | None:
        """Returns the median of one result; None if no run has it."""
        return next((result.value for result in self.results if result.name == name), None)


def results_of(runs: Sequence[Mapping[str, Figure]]) -> tuple[Result, ...]:
    """Returns one result for each name that any run has, in the order of first appearance."""
    units = {name: figure.unit for run in runs for name, figure in run.items()}
    return tuple(
        result_of(name, [run[name].value for run in runs if name in run], unit)
        for name, unit in units.items()
    )


def to_json(report: Report) -> bytes:
    """Encodes the report as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def from_json(data: bytes) -> Report:
    """Inverts `to_json`."""
    return msgspec.json.decode(data, type=Report)


def result_of(name: str, runs: Iterable[float], unit: str) -> Result:
    """Makes a result: the median of its runs."""
    values = tuple(runs)
    return Result(name=name, value=statistics.median(values), unit=unit, runs=values)


def notes_on(versions: Mapping[str, str], missing: Sequence[Missing] = ()) -> dict[str, Scalar]:
    """Returns the entries of a report's config on peers' versions and on parts that could not be
    measured.
    """
    return {
        **{f"version_{name}": version for name, version in versions.items()},
        **{f"failed_{one.name}".replace(" ", "_"): one.reason for one in missing},
    }
