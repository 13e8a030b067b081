"""Computes the results of `bench router` from its measured decisions. Pure.

| result                       | unit    |                                                    |
|------------------------------|---------|----------------------------------------------------|
| decisions/<case>             | 1/s     | on one core                                        |
| latency_p50/<case>, p99, p999| µs      | of one decision                                    |
| requests/<case>              | 1/s     | decided, claimed in the view, and given back       |
| ingest                       | 1/s     | blocks reported as stored, in chains of 24         |
| bytes_per_block              | bytes   | of memory, at three workers a block                |
| background/cpu               | %       | of all cores, used by other programs               |

A case is a number of workers, at a million blocks, or workers/blocks. A peer's `ratio` is ours over
theirs; for latencies, less than one is better.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from math import fsum
from typing import TypeVar

from bench.common.background import busy_results, busy_warning
from bench.common.report import Figure, Result, result_of, results_of
from bench.common.stats import percentile
from bench.router.plan import MAIN_BLOCKS
from bench.router.run import RouterMeasured, Run

PEER = "dict_bitmask"
_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p999": 99.9}

_Statistic = Callable[[Run], Figure]
_T = TypeVar("_T")


def results(
    cases: Sequence[RouterMeasured], ingest: tuple[Sequence[float], Sequence[float]]
) -> tuple[Result, ...]:
    """All results, in the order of the table above."""
    found = [
        _beside(f"{name}/{measured.case.name}", measured.ours, measured.peer, statistic)
        for name, statistic in _statistics().items()
        for measured in cases
    ]
    found += [_beside(f"requests/{one.case.name}", one.requests, (), _rate) for one in cases]
    found.append(_beside("ingest", ingest[0], ingest[1], lambda rate: Figure(rate, "1/s")))
    main = [measured for measured in cases if measured.case.num_blocks == MAIN_BLOCKS] or cases
    sizes = [one.bytes_per_block for one in main]
    shares = [share for one in cases for share in one.background]
    return (*found, result_of("bytes_per_block", sizes, "bytes"), *busy_results(shares))


def warnings(cases: Sequence[RouterMeasured]) -> list[str]:
    """A line for each reason not to trust the results."""
    return busy_warning(share for one in cases for share in one.background)


def _statistics() -> Mapping[str, _Statistic]:
    latencies = {f"latency_{name}": _latency(q) for name, q in _PERCENTILES.items()}
    return {"decisions": _rate, **latencies}


def _rate(run: Run) -> Figure:
    return Figure(len(run) / fsum(run), "1/s")


def _latency(q: float) -> _Statistic:
    return lambda run: Figure(1e6 * percentile(run, q), "µs")


def _beside(
    name: str, ours: Sequence[_T], theirs: Sequence[_T], figure: Callable[[_T], Figure]
) -> Result:
    [result] = results_of([{name: figure(run)} for run in ours])
    if not theirs:
        return result
    return result.beside({PEER: statistics.median(figure(run).value for run in theirs)})
