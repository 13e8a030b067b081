"""Measures how many placements per second a router decides, and the time of each decision.

Each repetition gives the same prompts to a `Fleet` and to its peer (`bench.lab.router.routers`).
Python's garbage collector stays on, but ignores the objects of the set-up.

| result                       | unit    |                                                    |
|------------------------------|---------|----------------------------------------------------|
| decisions/<case>             | 1/s     | placements that one core decides                   |
| latency_p50/<case>, p99, p999| µs      | time of one decision                               |
| requests/<case>              | 1/s     | decided, claimed in the view, and released         |
| ingest                       | 1/s     | blocks reported as stored, in chains of 24         |
| bytes_per_block              | bytes   | memory of a block that three workers hold          |
| background/cpu               | %       | share of cores used by other programs              |

A case is a number of workers with a million blocks, or workers/blocks. A peer's `ratio` is ours
over theirs; for latencies, less than one is better.
"""

import gc
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Annotated, ClassVar, Self, TypeVar

import typer

from bench.common.background import BusyWatch, busy_results, busy_warning
from bench.common.command import RepeatOption, Say, values_of
from bench.common.report import Figure, Goals, Result, result_of, results_of
from bench.common.stats import percentile
from bench.lab.experiment import Experiment, Findings
from bench.lab.router.routers import (
    CHAIN_BLOCKS,
    COSTS,
    MAIN_BLOCKS,
    NUM_REPLICAS,
    POOL_BLOCKS,
    BitmaskRouter,
    OurRouter,
    PeerRouter,
    RouterCase,
    Run,
    World,
    ingested_per_s,
)
from engine.errors import ConfigError

PEER = "dict_bitmask"
MAX_PEER_BLOCKS = MAIN_BLOCKS  # with more blocks, the peer's Python dict would need gigabytes
# the case whose blocks are added to empty routers in each repetition
INGEST = RouterCase(1_000, 200_000)
_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p999": 99.9}
_T = TypeVar("_T")

FULL_CASES = (
    *(RouterCase(num_workers, MAIN_BLOCKS) for num_workers in (10, 100, 1_000, 10_000)),
    *(RouterCase(num_workers, num) for num_workers in (1_000, 10_000) for num in (10**5, 10**7)),
)
QUICK_CASES = (
    RouterCase(1_000, MAIN_BLOCKS),
    RouterCase(10_000, MAIN_BLOCKS),
    RouterCase(10, 10**5),
)


@dataclass(slots=True)
class RouterMeasured:
    """The measurements of one case."""

    case: RouterCase
    ours: list[Run] = field(default_factory=list)
    requests: list[Run] = field(default_factory=list)
    peer: list[Run] = field(default_factory=list)
    ingest: float = 0.0  # block events/s
    bytes_per_block: float = 0.0
    # share of the CPU that other programs used
    background: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStudy(Experiment):
    """Measure how many placements a router decides in a second, and how long each takes."""

    NAME: ClassVar = "router"
    QUICK: ClassVar = "Three cases, shorter runs: under 50 s."
    GOALS: ClassVar = Goals(  # the project's goals for one core
        {
            "decisions/1000": 150e3,
            "decisions/10000": 100e3,
            "latency_p99/1000": 25.0,
            "latency_p99/10000": 25.0,
            "ingest": 1e6,
            "bytes_per_block": 100.0,
        },
        at_most=("latency*", "bytes*"),
    )

    cases: Annotated[
        str | None,
        typer.Option(metavar="WORKERS:BLOCKS,…", help="What to measure.", show_default="10 … 10⁴"),
    ] = None
    decisions: Annotated[int, typer.Option(min=100, help="Decisions of one run.")] = 20_000
    repeat: RepeatOption = 7

    def __post_init__(self) -> None:
        """Raises ConfigError, which names the wrong option."""
        for case in self.chosen:
            if case.num_workers < 2 * NUM_REPLICAS:
                raise ConfigError(f"--cases: {2 * NUM_REPLICAS} workers at least: {self.cases}")
            if case.num_blocks < CHAIN_BLOCKS:
                raise ConfigError(f"--cases: {CHAIN_BLOCKS} blocks at least: {self.cases}")

    @property
    def chosen(self) -> Sequence[RouterCase]:
        """Returns the cases to measure."""
        if self.cases:
            return values_of("--cases", self.cases, _case, "WORKERS:BLOCKS,…")
        return QUICK_CASES if self.is_quick else FULL_CASES

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return f"Placements on one core: {self.repeat} × {self.decisions} decisions a case"

    def quick(self) -> Self:
        """Returns a study with fewer and shorter runs."""
        decisions, repeat = min(self.decisions, 5_000), min(self.repeat, 5)
        return replace(self, decisions=decisions, repeat=repeat, is_quick=True)

    def measure(self, say: Say) -> Findings:
        """Measures all cases. Raises BuildError if the C++ code cannot be built."""
        measured = [self.measure_case(case, say) for case in self.chosen]
        return Findings(results(measured, self.measure_ingest(INGEST)), warnings(measured))

    def measure_case(self, case: RouterCase, say: Say) -> RouterMeasured:
        """Measures one case."""
        say(f"{case.num_workers} workers, {case.num_blocks:,} blocks")
        world = World(case, random.Random(self.seed))
        ours = OurRouter(world, self.seed)
        measured = RouterMeasured(case, ingest=ours.ingest())
        measured.bytes_per_block = ours.index.num_bytes / ours.index.num_blocks
        theirs = PeerRouter(world) if case.num_blocks <= MAX_PEER_BLOCKS else None
        busy = BusyWatch(lambda: [os.getsid(0)])
        gc.collect()
        gc.freeze()
        try:
            for _ in range(self.repeat):
                with busy.repetition():
                    decisions, requests = ours.run(world.prompts(self.decisions))
                    measured.ours.append(decisions)
                    measured.requests.append(requests)
                    if theirs is not None:
                        measured.peer.append(theirs.run(world.prompts(self.decisions)))
        finally:
            gc.unfreeze()
        measured.background = busy.shares
        ours.fleet.validate()
        return measured

    def measure_ingest(self, case: RouterCase) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the block events/s that our index and the peer process. Both start empty in each
        repetition and take turns.
        """
        world = World(case, random.Random(self.seed))
        ours, theirs = [], []
        for _ in range(self.repeat):
            ours.append(OurRouter(world, self.seed).ingest())
            peer = BitmaskRouter(world.prefills, POOL_BLOCKS, COSTS)
            theirs.append(ingested_per_s(world, range(len(world.names)), peer.stored))
        return tuple(ours), tuple(theirs)


def results(
    cases: Sequence[RouterMeasured], ingest: tuple[Sequence[float], Sequence[float]]
) -> tuple[Result, ...]:
    """Returns all results, in the order of the table in this module's docstring."""
    figures = {"decisions": _rate} | {
        f"latency_{name}": _latency(q) for name, q in _PERCENTILES.items()
    }
    found = [
        _beside(f"{name}/{measured.case.name}", measured.ours, measured.peer, statistic)
        for name, statistic in figures.items()
        for measured in cases
    ]
    found += [_beside(f"requests/{one.case.name}", one.requests, (), _rate) for one in cases]
    found.append(_beside("ingest", ingest[0], ingest[1], lambda rate: Figure(rate, "1/s")))
    main = [measured for measured in cases if measured.case.num_blocks == MAIN_BLOCKS] or cases
    sizes = [one.bytes_per_block for one in main]
    shares = [share for one in cases for share in one.background]
    return (*found, result_of("bytes_per_block", sizes, "bytes"), *busy_results(shares))


def warnings(cases: Sequence[RouterMeasured]) -> list[str]:
    """Returns a line for each reason not to trust the results."""
    return busy_warning(share for one in cases for share in one.background)


def _rate(run: Run) -> Figure:
    return Figure(len(run) / fsum(run), "1/s")


def _latency(q: float) -> Callable[[Run], Figure]:
    return lambda run: Figure(1e6 * percentile(run, q), "µs")


def _beside(
    name: str, ours: Sequence[_T], theirs: Sequence[_T], figure: Callable[[_T], Figure]
) -> Result:
    [result] = results_of([{name: figure(run)} for run in ours])
    if not theirs:
        return result
    return result.beside({PEER: statistics.median(figure(run).value for run in theirs)})


def _case(text: str) -> RouterCase:
    workers, blocks = text.split(":")
    return RouterCase(int(workers), int(blocks))
