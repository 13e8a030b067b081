"""Computes the figures of a simulation. Pure.

Latencies are those of finished answers, measured at the gateway, in milliseconds. A refused or
failed request meets no SLO. ITL percentiles cover all gaps of all answers. Goodput follows the
three usual definitions of `bench.client.load`, also per GPU. Mooncake's effective capacity is also
computed for the bounds of its paper: TTFT 30 s, and TBT 100, 200 and 300 ms. DistServe's goodput
needs several simulations (see `goodput`).

Prefix hits are the share of all prompt tokens that were cached or pulled. `infinite_cache` is this
share for a cache that never evicts.

Figures of stores are by medium. The hits of a store are the prompt tokens that it leased to
workers, as a share of all prompt tokens. A hit counts for the medium that had the block at the
request. Reads, evictions and dropped blocks are summed over all stores. A dropped write never
reached a lower tier. A block is dropped if the store requested it from a worker and did not get it.

A pool's utilisation is the share of time that its workers spent in steps. Costs are the price of
all GPUs for the whole run, divided by all tokens, including prompts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from bench.client.load import SloBounds
from bench.common.plots import RequestSpan
from bench.common.report import Figure
from bench.common.stats import Summary, summarize
from bench.simulator.cluster import (
    SimulatedRequest,
    SimulatedRun,
    SimulationSetup,
    simulate_stream,
)
from bench.simulator.goodput import (
    GapSketch,
    InfiniteCache,
    RequestTally,
    Values,
    gaps_of,
    infinite_cache_hits,
    latencies_of,
)
from bench.simulator.pools import join_figures
from bench.simulator.traces import Trace, TraceRequest
from engine.worker.block_events import Medium
from router.machine.machine import RouterMachine

MOONCAKE_TTFT_S = 30.0
MOONCAKE_TBT_S = (0.1, 0.2, 0.3)
NUM_TOGETHER = 4096


def figures_of(run: SimulatedRun, slo: SloBounds, *, usd_per_gpu_hour: float) -> dict[str, Figure]:
    """Returns all figures of one simulation."""
    return {
        **figures_of_tally(
            run,
            RequestTally.of(run.records),
            slo,
            gaps=summary_of_gaps(run.records),
            infinite_hits=infinite_cache_hits(run.trace),
            usd_per_gpu_hour=usd_per_gpu_hour,
        ),
        **join_figures(run.evenness, run.num_moved),
    }


def streamed_figures(
    trace: Trace,
    requests: Iterable[TraceRequest],
    setup: SimulationSetup,
    machine: RouterMachine,
    slo: SloBounds,
    *,
    usd_per_gpu_hour: float,
) -> dict[str, Figure]:
    """Simulates requests without keeping them (see `simulate_stream`) and returns the figures.

    Percentiles of gaps are those of a `GapSketch`.
    """
    tally, gaps, cache = RequestTally(), GapSketch(), InfiniteCache(trace.block_tokens)

    def ended(_: int, record: SimulatedRequest) -> None:
        tally.add(record)
        if len(record.times_s) > 1:
            gaps.add(gaps_of(record.times_s))

    run = simulate_stream(trace, cache.watch(requests), setup, machine, ended)
    return figures_of_tally(
        run,
        tally,
        slo,
        gaps=gaps.summary(),
        infinite_hits=cache.hits,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )


def figures_of_tally(
    run: SimulatedRun,
    tally: RequestTally,
    slo: SloBounds,
    *,
    gaps: Summary | None,
    infinite_hits: float,
    usd_per_gpu_hour: float,
) -> dict[str, Figure]:
    """Returns the figures of a simulation from the tally of its requests."""
    return {
        **_latency_figures(tally, gaps),
        **_goodput_figures(run, tally, slo),
        **_prefix_figures(tally, infinite_hits),
        **_store_figures(run, tally),
        **_pool_figures(run),
        **_outcome_figures(run, tally),
        **_cost_figures(run, tally, usd_per_gpu_hour),
    }


def _latency_figures(tally: RequestTally, gaps: Summary | None) -> dict[str, Figure]:
    summaries = {
        "ttft": summarize(tally.ttft_s),
        "tpot": summarize(tally.tpot_s),
        "itl": gaps,
        "e2e": summarize(tally.e2e_s),
    }
    figures: dict[str, Figure] = {}
    for name, summary in summaries.items():
        if summary is not None:
            figures |= {
                f"{name}/{statistic}": Figure(value_s * 1000, "ms")
                for statistic, value_s in asdict(summary).items()
            }
    return figures


def summary_of_gaps(records: Sequence[SimulatedRequest]) -> Summary | None:
    """Returns the summary of all gaps between the tokens of an answer, in seconds."""
    parts = [*_gaps_s(records)]
    if not parts:
        return None
    total = sum(float(part.sum()) for part in parts)
    ordered: Values = np.concatenate(parts)
    del parts  # freed early, because the gaps of a long run need as much memory as its records
    ordered.sort()
    p50, p90, p99 = (_percentile_of_sorted(ordered, q) for q in (50, 90, 99))
    return Summary(mean=total / len(ordered), p50=p50, p90=p90, p99=p99)


def _percentile_of_sorted(ordered: Values, q: float) -> float:
    """Interpolates like `bench.common.stats.percentile`."""
    at = (len(ordered) - 1) * q / 100
    low, high = float(ordered[math.floor(at)]), float(ordered[math.ceil(at)])
    return low + (high - low) * (at - math.floor(at))


def _gaps_s(records: Sequence[SimulatedRequest]) -> Iterator[Values]:
    """Yields the gaps of all records, some records at a time."""
    for start in range(0, len(records), NUM_TOGETHER):
        some = records[start : start + NUM_TOGETHER]
        parts = [gaps_of(record.times_s) for record in some if len(record.times_s) > 1]
        if parts:
            yield np.concatenate(parts)


def _goodput_figures(run: SimulatedRun, tally: RequestTally, slo: SloBounds) -> dict[str, Figure]:
    num, gpus = tally.number, _num_gpus(run)
    num_good = tally.num_within(slo)
    figures = {
        "goodput/attainment": Figure(num_good / num, "share"),
        "goodput/effective_capacity": Figure(tally.num_effective(slo) / num, "share"),
        "goodput/requests": Figure(num_good / run.duration_s, "1/s"),
        "goodput/requests_per_gpu": Figure(num_good / run.duration_s / gpus, "1/s"),
    }
    for tbt_s in MOONCAKE_TBT_S:
        share = tally.num_effective(SloBounds(MOONCAKE_TTFT_S, tbt_s)) / num
        figures[f"goodput/mooncake_tbt_{tbt_s * 1000:.0f}ms"] = Figure(share, "share")
    return figures


def _prefix_figures(tally: RequestTally, infinite_hits: float) -> dict[str, Figure]:
    num_tokens = tally.num_prefilled_tokens
    hits = tally.num_cached_tokens / num_tokens if num_tokens else 0.0
    return {
        "prefix/hits": Figure(hits, "share"),
        "prefix/infinite_cache": Figure(infinite_hits, "share"),
    }


def _store_figures(run: SimulatedRun, tally: RequestTally) -> dict[str, Figure]:
    """Returns hits and work of the stores by medium; empty without stores."""
    if not run.stores:
        return {}
    counters: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for store in run.stores:
        counters.update(store.counters)
        held.update(store.num_held)
    block_size = run.setup.hardware.layout.block_size
    num_tokens = tally.num_input_tokens
    figures: dict[str, Figure] = {}
    for medium in held:
        share = counters[f"offered_blocks:{medium}"] * block_size / num_tokens
        figures[f"store/hits/{medium}"] = Figure(share, "share")
        figures[f"store/held/{medium}"] = Figure(held[medium] * block_size, "tokens")
        figures[f"store/evicted/{medium}"] = Figure(counters[f"evicted_blocks:{medium}"], "blocks")
        if medium != Medium.HOST:
            loaded, written = (counters[f"{did}_blocks:{medium}"] for did in ("loaded", "written"))
            figures[f"store/loads/{medium}"] = Figure(loaded, "blocks")
            figures[f"store/written/{medium}"] = Figure(written, "blocks")
            dropped = _sum_of(counters, f"dropped_writes:{medium}_")
            figures[f"store/dropped_writes/{medium}"] = Figure(dropped, "blocks")
    return {
        **figures,
        "store/taken": Figure(counters["taken_blocks"], "blocks"),
        "store/dropped": Figure(_sum_of(counters, "dropped_blocks:"), "blocks"),
        "store/prefetched": Figure(counters["prefetched_blocks"], "blocks"),
        "store/fallbacks": Figure(_sum_of(counters, "fallbacks:"), ""),
    }


def _sum_of(counters: Mapping[str, float], start: str) -> float:
    """Returns the sum of the counters whose names start with this prefix."""
    return sum(count for name, count in counters.items() if name.startswith(start))


def _pool_figures(run: SimulatedRun) -> dict[str, Figure]:
    by_role: dict[str, list[float]] = {}
    for worker in run.workers:
        by_role.setdefault(str(worker.role), []).append(worker.busy_s / run.duration_s)
    return {
        f"utilisation/{role}": Figure(sum(shares) / len(shares), "share")
        for role, shares in by_role.items()
    }


def _outcome_figures(run: SimulatedRun, tally: RequestTally) -> dict[str, Figure]:
    kinds, seconds = tally.kinds, run.duration_s
    return {
        **{f"requests/{kind}": Figure(kinds[kind], "") for kind in sorted(kinds)},
        "requests/retried": Figure(tally.num_retried, ""),
        "throughput/requests": Figure(kinds["finished"] / seconds, "1/s"),
        "throughput/output_tokens": Figure(tally.num_output_tokens / seconds, "tokens/s"),
        "duration": Figure(seconds, "s"),
    }


def _cost_figures(
    run: SimulatedRun, tally: RequestTally, usd_per_gpu_hour: float
) -> dict[str, Figure]:
    gpu_hours = _num_gpus(run) * run.duration_s / 3600
    usd = gpu_hours * usd_per_gpu_hour
    num_tokens = tally.num_prefilled_tokens + tally.num_output_tokens
    figures = {"cost/gpu_hours": Figure(gpu_hours, "h"), "cost/total": Figure(usd, "USD")}
    if num_tokens:
        figures["cost/per_million_tokens"] = Figure(usd / num_tokens * 1e6, "USD")
    return figures


def _num_gpus(run: SimulatedRun) -> int:
    return run.setup.pools.total * run.setup.hardware.gpus


def series_ms(run: SimulatedRun) -> Mapping[str, list[float]]:
    """Returns the samples to plot, in milliseconds."""
    answered = [one for one in map(latencies_of, run.records) if one is not None]
    return {
        "TTFT": [one.ttft_s * 1000 for one in answered],
        "TPOT": [one.tpot_s * 1000 for one in answered if one.tpot_s is not None],
    }


def spans_of(run: SimulatedRun) -> list[RequestSpan]:
    """Returns the times of all requests on the simulated clock. Refused and failed requests have no
    first token.
    """
    return [_span(record) for record in run.records]


def _span(record: SimulatedRequest) -> RequestSpan:
    due_s, times_s = record.asked.arrived_s, record.times_s
    if latencies_of(record) is None:
        ended_s = due_s if math.isnan(record.ended_s) else record.ended_s
        return RequestSpan(due_s, None, max(ended_s, due_s), 0)
    return RequestSpan(due_s, times_s[0], times_s[-1], len(times_s))
