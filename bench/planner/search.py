"""Searches for the fewest workers that meet the bounds in simulation.

A size passes if nine in ten requests of a synthetic load (see `workload`) meet both bounds. The
simulation uses the real router machine with the `slo` policy, and the workers' real schedulers.
Only the middle half of the requests counts, because the cluster fills at the begin and drains at
the end.

The search starts from the formula's size. The pool whose bound is missed grows until both bounds
are met. Then each pool shrinks while the bounds are still met. If additional workers never make
latencies worse, no size with fewer workers in both pools passes.

The simulated time must be long enough for sequences to begin and end: four times the longest
answer. If more requests than the wanted number arrive in that time, the load is divided into equal
cells. One cell is simulated, and all cells get the same size. Cells share neither queues nor
caches, so the result may have too many workers, but not too few. By formula, a cell has at least
three workers of each pool. To reach this, up to four times the wanted number of requests are
simulated.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from bench.client.load import SloBounds
from bench.common.stats import percentile
from bench.planner.load import ExpectedLoad, PoolEstimate, workload
from bench.planner.pricing import PlannedWorker
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulatedRequest,
    SimulatedRun,
    SimulationSetup,
    simulate,
)
from bench.simulator.goodput import latencies_of, meets
from bench.simulator.tiers import SimulatedStores
from bench.simulator.traces import Trace
from engine.config import RouterConfig, RouterPolicy
from router.machine.machine import RouterMachine

NEEDED = 0.9  # share of requests that must meet both bounds
SPANS = 4  # simulated time, as a multiple of the longest answer's time
_STRAY = 4  # greatest size in the search, as a multiple of the formula's size
_GROWTH = 8  # a pool grows by one eighth
_CELL_WORKERS = 3
_MAX_LONGER = 4  # greatest number of simulated requests, as a multiple of the wanted number


@dataclass(frozen=True, slots=True)
class Cells:
    """The division of a load into cells, and the simulated part of one cell."""

    number: int
    num_requests: int
    spans: float  # simulated time, divided by the longest answer's time


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulation of one cell. Latencies are None if there is no answer."""

    cells: Cells
    pools: SimulatedPools  # pools of one cell
    attainment: float  # share of requests that met both bounds
    ttft_attainment: float
    tpot_attainment: float
    ttft_p90_s: float | None
    tpot_p90_s: float | None
    prefix_hits: float
    busy: dict[str, float]  # share of time in which workers computed, by role

    @property
    def passes(self) -> bool:
        """Returns True if enough requests met both bounds."""
        return self.attainment >= NEEDED

    @property
    def total(self) -> SimulatedPools:
        """Returns the workers of all cells together."""
        pools, number = self.pools, self.cells.number
        return SimulatedPools(pools.prefill * number, pools.decode * number, pools.mixed * number)


@dataclass(frozen=True, slots=True)
class Depth:
    """The amount of simulation: numbers of requests and of workers."""

    num_requests: int = 600
    seed: int = 0


def cells_of(load: ExpectedLoad, slo: SloBounds, depth: Depth, *, smallest_pool: int) -> Cells:
    """Divides a load into cells. `smallest_pool` is the size of the whole load's smallest pool, by
    formula.
    """
    assert slo.tpot_s is not None
    assert slo.ttft_s is not None
    span_s = slo.ttft_s + load.output_tokens * slo.tpot_s
    wanted = load.rate_per_s * span_s * SPANS
    by_size = max(smallest_pool // _CELL_WORKERS, 1)
    number = max(1, min(math.ceil(wanted / depth.num_requests), by_size))
    longest = _MAX_LONGER * depth.num_requests
    num_requests = min(max(math.ceil(wanted / number), depth.num_requests), longest)
    return Cells(number, num_requests, num_requests / (load.rate_per_s / number * span_s))


class Search:
    """Searches for the fewest workers of one kind. Caches simulations."""

    def __init__(
        self, load: ExpectedLoad, worker: PlannedWorker, slo: SloBounds, *, cells: Cells, seed: int
    ) -> None:
        self.load = replace(load, rate_per_s=load.rate_per_s / cells.number)
        self.cells = cells
        self._stores: SimulatedStores | None = None
        self._worker = worker
        self._slo = slo
        self._seed = seed
        self._trace = workload(
            self.load,
            num_requests=cells.num_requests,
            block_tokens=worker.hardware.layout.block_size,
            rng=Random(f"{seed}/workload"),
        )
        self._seen: dict[SimulatedPools, Simulated] = {}

    def with_stores(self, stores: SimulatedStores) -> "Search":
        """Returns a search for the same load with KV stores."""
        other = copy.copy(self)
        other._stores, other._seen = stores, {}
        return other

    def smallest(self, start: PoolEstimate, *, max_workers: int) -> Simulated | None:
        """Returns the smallest size that passes, or None if a cell needs more than
        `max_workers`.
        """
        most = min(max_workers, _STRAY * start.pools.total + 2)
        pools = start.pools
        while not (found := self.check(pools)).passes:
            if pools.total >= most:
                return None
            pools = _grown(found)
        for role in ("decode", "prefill", "mixed"):
            floor = 0 if getattr(pools, role) == 0 else 1
            while getattr(pools, role) > floor:
                fewer = replace(pools, **{role: getattr(pools, role) - 1})
                if not self.check(fewer).passes:
                    break
                pools = fewer
        return self.check(pools) if pools.total <= max_workers else None

    def check(self, pools: SimulatedPools) -> Simulated:
        """Simulates a cell with these numbers of workers and returns the result."""
        if pools not in self._seen:
            router = RouterConfig(
                policy=RouterPolicy.SLO,
                seed=self._seed,
                max_queue=len(self._trace.requests),
                queue_timeout_s=3600.0,
                slo_tpot_s=self._slo.tpot_s,
            )
            setup = SimulationSetup(
                self._worker.hardware,
                pools,
                max_answer_tokens=MAX_ANSWER_TOKENS,
                stores=self._stores,
            )
            run = simulate(self._trace, setup, RouterMachine(router))
            self._seen[pools] = _judged(run, self._slo, self.cells)
        return self._seen[pools]


def _grown(found: Simulated) -> SimulatedPools:
    pools = found.pools
    if pools.mixed:
        return SimulatedPools(mixed=_more(pools.mixed))
    short_of_ttft = found.ttft_attainment < NEEDED
    short_of_tpot = found.tpot_attainment < NEEDED
    # Enough requests meet each single bound, but too few meet both.
    if not short_of_ttft and not short_of_tpot:
        short_of_ttft = found.ttft_attainment <= found.tpot_attainment
        short_of_tpot = not short_of_ttft
    return SimulatedPools(
        _more(pools.prefill) if short_of_ttft else pools.prefill,
        _more(pools.decode) if short_of_tpot else pools.decode,
    )


def _more(num: int) -> int:
    return num + max(1, num // _GROWTH)


def _judged(run: SimulatedRun, slo: SloBounds, cells: Cells) -> Simulated:
    middle = _middle(run.trace, run.records)
    latencies = [latencies_of(record) for record in middle]
    answered = [one for one in latencies if one is not None]
    ttfts_s = [one.ttft_s for one in answered]
    tpots_s = [one.tpot_s for one in answered if one.tpot_s is not None]
    num = len(middle)
    cached = sum(r.timeline.num_cached_tokens for r in middle if r.timeline is not None)
    return Simulated(
        cells=cells,
        pools=run.setup.pools,
        attainment=sum(meets(one, slo) for one in latencies) / num,
        ttft_attainment=sum(meets(one, SloBounds(slo.ttft_s, None)) for one in latencies) / num,
        tpot_attainment=sum(meets(one, SloBounds(None, slo.tpot_s)) for one in latencies) / num,
        ttft_p90_s=percentile(ttfts_s, 90) if ttfts_s else None,
        tpot_p90_s=percentile(tpots_s, 90) if tpots_s else None,
        prefix_hits=cached / sum(r.asked.input_len for r in middle),
        busy=_busy(run),
    )


def _middle(trace: Trace, records: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
    quarter = len(trace.requests) // 4
    return records[quarter : len(records) - quarter]


def _busy(run: SimulatedRun) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for worker in run.workers:
        shares.setdefault(str(worker.role), []).append(worker.busy_s / run.duration_s)
    return {role: sum(of_role) / len(of_role) for role, of_role in shares.items()}
