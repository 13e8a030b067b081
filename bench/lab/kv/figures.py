"""Computes the results of `bench kv` from its measured times. Pure.

| result                                       | unit  |                                        |
|----------------------------------------------|-------|----------------------------------------|
| <mover>/<size>                               | GiB/s | 64 MiB in blocks of that size          |
| <mover>/<size>/<number>                      | GiB/s | fewer blocks                           |
| <mover>/<size>/latency                       | µs    | one block                              |
| hidden_share/<transport>                     | share | of the time in which blocks moved, the |
|                                              |       | part during which prefill still ran    |
| kv_transfer/<transport>, kv_exposed/…        | ms    | all that time, and its exposed part    |
| first_token_after_handoff/<phase>/<transport>| ms    | from the first token to the second     |
| background/cpu                               | %     | of all cores, used by other programs   |

A backend's `limit` is the median of the limit's fastest way. Limits are results of their own too.
The limit of a backend that pulls half of the heads is the backend itself with whole blocks.
A peer's `ratio` is ours over theirs; for latencies, less than one is better.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from types import MappingProxyType

from bench.common.background import busy_results, busy_warning
from bench.common.report import Figure, Result, result_of
from bench.lab.kv.cases import KvCase, limit_of
from bench.lab.kv.contest import KvMeasured

GIB = 2**30
PHASES = ("kv_wait", "decode_queue", "first_step")  # from the first token to the second
TRANSFER = ("kv_transfer", "kv_exposed")
AFTER_HANDOFF = "first_token_after_handoff"
COMPILED = "c"  # the way of memcpy without Python in its loop

Timeline = Mapping[str, float]  # seconds by stage


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Timelines of requests that were prefilled in one worker and decoded in another."""

    transport: str
    repetitions: tuple[tuple[Timeline, ...], ...]
    num_failed: int = 0


def results(
    measured: KvMeasured,
    handoffs: Sequence[Handoffs] = (),
    *,
    movers: Sequence[str],
    peers: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[Result, ...]:
    """All results, in the order of the table above. `peers` has some movers' results, by name."""
    found = [
        _result(measured, mover, case, peers=peers.get(mover, ()))
        for mover in movers
        if mover in measured.movers
        for case in measured.cases
    ]
    return (*found, *_handoff_results(handoffs), *busy_results(measured.background))


def warnings(measured: KvMeasured, handoffs: Sequence[Handoffs] = ()) -> list[str]:
    """A line for each reason not to trust the results."""
    lines = [missing.told for missing in measured.missing]
    if "memcpy" in measured.movers and all(key.way != COMPILED for key in measured.seconds):
        lines.append("no C compiler works here: memcpy is called from Python, which is slower")
    lines += busy_warning(measured.background)
    for handoff in handoffs:
        if handoff.num_failed:
            lines.append(f"{handoff.num_failed} requests over {handoff.transport} failed")
        absent = [name for name in (*TRANSFER, *PHASES) if not _all_have(handoff, name)]
        if absent:
            told = ", ".join(f"{name}_s" for name in absent)
            lines.append(f"over {handoff.transport} not every timeline has {told}: left out")
    return lines


def _result(measured: KvMeasured, mover: str, case: KvCase, *, peers: Sequence[str]) -> Result:
    figures = [_figure(case, s) for s in _best(measured, mover, case)]
    result = result_of(f"{mover}/{case.name}", [f.value for f in figures], figures[0].unit)
    result = result.beside(
        {peer: _median(measured, peer, case) for peer in peers if peer in measured.movers}
    )
    limit = limit_of(mover)
    if case.is_latency or limit not in measured.movers:
        return result
    return result.limited(_median(measured, limit, case))


def _median(measured: KvMeasured, mover: str, case: KvCase) -> float:
    return statistics.median(_figure(case, s).value for s in _best(measured, mover, case))


def _best(measured: KvMeasured, mover: str, case: KvCase) -> tuple[float, ...]:
    """The times of a mover's fastest way."""
    ways = [
        runs for key, runs in measured.seconds.items() if (key.mover, key.case) == (mover, case)
    ]
    return min(ways, key=statistics.median)


def _figure(case: KvCase, seconds: float) -> Figure:
    if case.is_latency:
        return Figure(seconds * 1e6, "µs")
    return Figure(case.num_bytes / seconds / GIB, "GiB/s")


def _handoff_results(handoffs: Sequence[Handoffs]) -> Iterator[Result]:
    for handoff in handoffs:
        shares = list(_hidden(handoff)) if _all_have(handoff, *TRANSFER) else []
        if shares:
            yield result_of(f"hidden_share/{handoff.transport}", shares, "share")
    for prefix, names in (("", TRANSFER), (f"{AFTER_HANDOFF}/", PHASES)):
        for handoff in handoffs:
            for name in names:
                if _all_have(handoff, name):
                    means_ms = [
                        1e3 * statistics.mean(timeline[name] for timeline in timelines)
                        for timelines in handoff.repetitions
                    ]
                    yield result_of(f"{prefix}{name}/{handoff.transport}", means_ms, "ms")


def _hidden(handoff: Handoffs) -> Iterator[float]:
    for timelines in handoff.repetitions:
        transfer_s, exposed_s = (
            fsum(timeline[name] for timeline in timelines) for name in TRANSFER
        )
        if transfer_s > 0:
            yield 1 - exposed_s / transfer_s


def _all_have(handoff: Handoffs, *names: str) -> bool:
    timelines = [timeline for run in handoff.repetitions for timeline in run]
    return bool(timelines) and all(name in t for t in timelines for name in names)
