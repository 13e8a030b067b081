"""The report of every benchmark, as JSON and in memory, and goals for its results.

    {"bench", "command", "date", "commit", "hardware", "seed", "config",
     "results": [{"name", "value", "unit", "runs", "limit", "of_limit",
                  "peers": {"vllm": {"value", "ratio"}}}]}

`runs` has the figure of each repetition, unless the repetition has none; `value` is the median of
`runs`. `limit` is the highest figure that the machine allows, measured in the same run. `of_limit`
is the share of the limit that was reached. If each repetition has its own limit, `limit` and
`of_limit` are medians. Names are `thing/statistic`: `ttft/p50`, `throughput/output_tokens`.
`report_here` makes a report and adds the machine, the time and the command of the benchmark.
"""

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One named number of one run."""

    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Another system's figure on the same inputs. `ratio` is our figure divided by the peer's."""

    value: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Result:
    """One named figure, with its values in all runs."""

    name: str
    value: float
    unit: str
    runs: tuple[float, ...]
    limit: float | None = None
    of_limit: float | None = None
    peers: Mapping[str, Peer] = field(default_factory=dict)

    def limited(self, limit: float) -> "Result":
        """Returns this result with its limit: the highest value that the machine allows."""
        return replace(self, limit=limit, of_limit=self.value / limit)

    def limited_each(self, limits: Sequence[float]) -> "Result":
        """Returns this result with a limit for each run. The report has the medians of the limits
        and of the shares of them.
        """
        shares = [value / limit for value, limit in zip(self.runs, limits, strict=True)]
        return replace(self, limit=statistics.median(limits), of_limit=statistics.median(shares))

    def beside(self, theirs: Mapping[str, float]) -> "Result":
        """Returns this result with other systems' figures on the same inputs."""
        peers = {name: Peer(value, self.value / value) for name, value in theirs.items()}
        return replace(self, peers=peers)


@dataclass(frozen=True, slots=True)
class Missing:
    """A part of a plan that could not be measured, and the reason."""

    name: str
    reason: str

    @property
    def warning(self) -> str:
        """Returns the warning about the missing part."""
        return f"{self.name} was not measured: {self.reason}"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine that ran the benchmark. A server under test may run on another machine."""

    cpu: str | None
    num_cores: int
    memory_bytes: int | None
    gpus: tuple[str, ...]
    python: str


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run of a benchmark, and the facts that are needed to repeat the run."""

    bench: str
    command: str  # the command as a user types it
    date: str  # end of the run, UTC, ISO 8601: 2026-01-31T12:00:00+00:00
    commit: str | None  # commit of the checkout; None outside a repository
    hardware: Hardware
    seed: int
    config: Mapping[str, Scalar]
    results: tuple[Result, ...]

    def value(self, name: str) -> float | None:
        """Returns the median of one result; None if no run has the result."""
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
    """Decodes a report from the JSON of `to_json`."""
    return msgspec.json.decode(data, type=Report)


def result_of(name: str, runs: Iterable[float], unit: str) -> Result:
    """Makes a result whose value is the median of its runs."""
    values = tuple(runs)
    return Result(name=name, value=statistics.median(values), unit=unit, runs=values)


def notes_on(versions: Mapping[str, str], missing: Sequence[Missing] = ()) -> dict[str, Scalar]:
    """Returns the config entries that name the peers' versions and the parts that could not be
    measured.
    """
    return {
        **{f"version_{name}": version for name, version in versions.items()},
        **{f"failed_{one.name}".replace(" ", "_"): one.reason for one in missing},
    }


@dataclass(frozen=True, slots=True)
class Goals:
    """Bounds of results, by patterns of their names.

    For names that match a pattern of `at_most`, the bound is an upper bound. Other bounds are lower
    bounds.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    at_most: tuple[str, ...] = ()

    def bound(self, name: str) -> float | None:
        """Returns the goal of a result; None if the result has no goal."""
        found = (bound for pattern, bound in self.bounds.items() if fnmatchcase(name, pattern))
        return next(found, None)

    def is_met(self, result: Result) -> bool | None:
        """Returns True if the result meets its goal; None if the result has no goal."""
        bound = self.bound(result.name)
        if bound is None:
            return None
        if any(fnmatchcase(result.name, pattern) for pattern in self.at_most):
            return result.value <= bound
        return result.value >= bound


NO_GOALS = Goals()


HERE = Path(__file__).resolve().parent
OUTPUTS = ("--json", "--plot", "--csv", "--html")
CODE = (":(top)", ":(top,exclude)bench/results", ":(top,exclude)docs", ":(top,exclude)*.md")


def report_here(
    bench: str, *, seed: int, config: Mapping[str, Scalar], results: Sequence[Result]
) -> Report:
    """Makes the report of a benchmark that has just run in this process."""
    return Report(
        bench=bench,
        command=command_line(sys.argv),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit_here(),
        hardware=hardware(),
        seed=seed,
        config=config,
        results=tuple(results),
    )


def command_line(arguments: Sequence[str]) -> str:
    """Returns the command as a user types it, from `sys.argv`.

    Options for output files are left out. An absolute path is shortened to its last part, and a
    peer's Python to `PYTHON`.
    """
    program, *given = arguments
    words = ["baton"]
    if Path(program).name == "__main__.py":
        words = ["python", "-m", f"bench.{Path(program).parent.name}"]
    following = iter(given)
    for word in following:
        if word in OUTPUTS:
            next(following, None)
        elif not word.startswith(tuple(f"{option}=" for option in OUTPUTS)):
            words.append(_without_folder(word))
    return shlex.join(words)


def _without_folder(word: str) -> str:
    """Shortens `name=/a/python` to `name=PYTHON`, and `/a/trace.jsonl` to `trace.jsonl`."""
    name, equals, value = word.partition("=")
    if equals and "/" in value and not name.startswith("-"):
        return f"{name}=PYTHON"
    return Path(word).name if word.startswith("/") else word


def commit_here() -> str | None:
    """Returns the commit of the checkout that tracks this file. Appends `-dirty` if tracked files
    are changed.

    Changes of reports and documents do not count as dirty.

    Returns None without such a checkout. An installed copy may lie inside another repository, whose
    commit must not be reported.
    """
    if _output("git", "ls-files", "--error-unmatch", __file__) is None:
        return None
    head = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no", "--", *CODE)
    return f"{head}-dirty" if head and changes else head


def hardware() -> Hardware:
    """Returns a description of the machine that this process runs on."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or ""
    return Hardware(
        cpu=_cpu_model(),
        num_cores=_num_cores(),
        memory_bytes=_memory_bytes(),
        gpus=tuple(gpus.splitlines()),
        python=platform.python_version(),
    )


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, None) or platform.processor() or None


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _output(*command: str) -> str | None:
    """Runs a command and returns its output; None if the command is missing, fails or takes over 10
    s.
    """
    try:
        done = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
