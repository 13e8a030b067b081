"""The figures of `bench moves`. Pure.

| result        | unit |                                                                       |
|---------------|------|-----------------------------------------------------------------------|
| itl/p50       | ms   | between two chunks of a stream, before the flip                       |
| gap/p50 …     | ms   | the longest of each stream that moved, from the order on              |
| calm_gap/p50 …| ms   | the longest of each stream in an equally long time before             |
| pull/p50, max | ms   | the part of the gap in which KV was on its way                        |
| of_limit/p50 …|      | gap over 3 × the stream's median gap + its pull; promised: at most 1  |
| beside_gap/p50 … ms  | as `gap`, of the streams that ran in the target already               |
| beside_of_limit/… |  | as `of_limit`, of these: they pull nothing                            |
| flip          | s    | from the order until the controller says that it is carried out       |
| moved         |      | streams                                                               |
| ended_first   |      | streams that were over when the order came, or before their turn      |
| not_moved     |      | other streams: they were prefilled again, or stayed                   |
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.client.answers import Answer
from bench.common.report import Figure, Result, results_of
from bench.common.stats import percentile
from bench.moves.plan import CALM_S

NUM_GAPS = 3.0  # of the usual ones, that a move may take beside its pull
PULL = "move_pull"  # in a timeline


@dataclass(frozen=True, slots=True)
class MovesRun:
    """One flip. Times in seconds, of one clock."""

    streams: tuple[Answer, ...]
    ordered_s: float
    emptied_s: float
    beside: tuple[Answer, ...] = ()  # streams that began while the target decoded, nearly all on it


@dataclass(frozen=True, slots=True)
class Across:
    """One stream before and after the flip. Seconds."""

    itl_s: float  # the median before
    gap_s: float
    calm_gap_s: float
    pull_s: float

    @property
    def of_limit(self) -> float:
        """The gap, as a share of what was promised."""
        return self.gap_s / (NUM_GAPS * self.itl_s + self.pull_s)


def moved_of(run: MovesRun) -> list[Across]:
    """The streams that moved, if they have gaps before and after the order."""
    moved = [s for s in (*run.streams, *run.beside) if PULL in s.timeline_s]
    found = [_across(run, stream, stream.timeline_s[PULL]) for stream in moved]
    return [one for one in found if one is not None]


def beside_of(run: MovesRun) -> list[Across]:
    """The streams that ran in the target already, if they have gaps before and after the order."""
    found = [_across(run, s, 0.0) for s in run.beside if PULL not in s.timeline_s]
    return [one for one in found if one is not None]


def _ended_first(run: MovesRun, stream: Answer) -> bool:
    return stream.chunk_times_s[-1] <= min(run.emptied_s, run.ordered_s + CALM_S)


def _across(run: MovesRun, stream: Answer, pull_s: float) -> Across | None:
    begin_s, end_s = run.ordered_s - CALM_S, max(run.emptied_s, run.ordered_s + CALM_S)
    gaps = [(a, b - a) for a, b in pairwise(stream.chunk_times_s)]
    before = [g for a, g in gaps if begin_s <= a < run.ordered_s - g]
    across = [g for a, g in gaps if run.ordered_s - g <= a < end_s]
    if not before or not across:
        return None
    return Across(statistics.median(before), max(across), max(before), pull_s)


def figures_of(run: MovesRun) -> dict[str, Figure]:
    """Returns the figures of one flip."""
    moved = moved_of(run)
    stayed = [stream for stream in run.streams if PULL not in stream.timeline_s]
    figures = {
        "flip": Figure(run.emptied_s - run.ordered_s, "s"),
        "moved": Figure(len(moved), ""),
        "ended_first": Figure(sum(_ended_first(run, s) for s in stayed), ""),
        "not_moved": Figure(sum(not _ended_first(run, s) for s in stayed), ""),
    }
    if beside := beside_of(run):
        figures |= _spread("beside_gap", [1e3 * one.gap_s for one in beside], "ms")
        figures |= _spread("beside_of_limit", [one.of_limit for one in beside], "")
    if not moved:
        return figures
    gaps_ms = [1e3 * one.gap_s for one in moved]
    calm_ms = [1e3 * one.calm_gap_s for one in moved]
    pulls_ms = [1e3 * one.pull_s for one in moved]
    shares = [one.of_limit for one in moved]
    return {
        "itl/p50": Figure(1e3 * statistics.median(one.itl_s for one in moved), "ms"),
        **_spread("gap", gaps_ms, "ms"),
        **_spread("calm_gap", calm_ms, "ms"),
        **_spread("pull", pulls_ms, "ms"),
        **_spread("of_limit", shares, ""),
        **figures,
    }


def results(runs: Sequence[MovesRun]) -> tuple[Result, ...]:
    """Returns the rows of the table above."""
    return results_of([figures_of(run) for run in runs])


def _spread(name: str, values: Sequence[float], unit: str) -> dict[str, Figure]:
    return {
        f"{name}/p50": Figure(percentile(values, 50), unit),
        f"{name}/p90": Figure(percentile(values, 90), unit),
        f"{name}/max": Figure(max(values), unit),
    }
