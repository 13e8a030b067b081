"""The figures of `bench moves --join`: a decode worker joins beside a full one. Pure.

| result        | unit |                                                                          |
|---------------|------|--------------------------------------------------------------------------|
| ratio/before  |      | most over least streams of a decode worker when the new one serves       |
| ratio/after   |      | the same, `AFTER_S` later                                                |
| balance       | s    | from there until the ratio was first below `EVEN`; absent if it never was |
| stall         | ms   | longest gap of any stream from the join on                               |
| calm_stall    | ms   | longest gap of any stream of the same requests without a join            |
| itl/before, itl/after | ms | median gap before the join, and after the balance                  |
| moved         |      | streams                                                                  |
| changed       |      | streams whose text differs from that without a join: promised none       |

None counts as one in a ratio. The streams were begun before, so nothing but moves can fill the new
worker.
"""

import statistics
from dataclasses import dataclass
from itertools import pairwise

from bench.client.answers import Answer
from bench.common.report import Figure
from bench.simulator.joining import EVEN, ratio

AFTER_S = 5.0
PULL = "move_pull"  # in a timeline


@dataclass(frozen=True, slots=True)
class JoinRun:
    """One join. Times in seconds, of one clock."""

    alone: tuple[Answer, ...]  # answers to the same requests, without a join
    streams: tuple[Answer, ...]
    joined_s: float  # time at which the new worker began to serve
    # (time, number of streams of each decode worker) since the join.
    samples: tuple[tuple[float, tuple[int, ...]], ...]


def join_figures_of(run: JoinRun) -> dict[str, Figure]:
    """Returns the figures of one join."""
    after = min(run.samples, key=lambda one: abs(one[0] - run.joined_s - AFTER_S))
    even_s = next((at_s for at_s, nums in run.samples if ratio(nums) < EVEN), None)
    gaps = [(a, b - a) for stream in run.streams for a, b in pairwise(stream.chunk_times_s)]
    until_s = run.joined_s if even_s is None else even_s
    before = [gap for at_s, gap in gaps if at_s + gap < run.joined_s]
    since = [gap for at_s, gap in gaps if at_s + gap >= run.joined_s]
    later = [gap for at_s, gap in gaps if at_s > until_s]
    changed = sum(a.said != b.said for a, b in zip(run.alone, run.streams, strict=True))
    figures = {
        "ratio/before": Figure(ratio(run.samples[0][1]), ""),
        "ratio/after": Figure(ratio(after[1]), ""),
        "stall": Figure(1e3 * max(since, default=0.0), "ms"),
        "calm_stall": Figure(1e3 * max(g for one in run.alone for g in one.gaps_s), "ms"),
        "moved": Figure(sum(PULL in stream.timeline_s for stream in run.streams), ""),
        "changed": Figure(changed, ""),
    }
    if even_s is not None:
        figures["balance"] = Figure(even_s - run.joined_s, "s")
    for name, some in (("before", before), ("after", later)):
        if some:
            figures[f"itl/{name}"] = Figure(1e3 * statistics.median(some), "ms")
    return figures
