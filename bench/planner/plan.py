"""Plans capacity: the GPUs that a load needs, the pools, and the savings of each option.

First, formulas choose the number of GPUs per worker. A candidate has memory for the model and the
longest request, and a single request meets both bounds. The candidate with the fewest GPUs in total
is chosen. The number of workers is then found by simulation, unless simulation is turned off. If
prompts share prefixes, the best plan is simulated again with KV stores.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bench.client.load import SloBounds
from bench.planner.load import ExpectedLoad, PoolEstimate, colocated, disaggregated, floor_of
from bench.planner.model import DenseModel
from bench.planner.pricing import (
    ModelOptions,
    PlannedWorker,
    Platform,
    block_size_for,
    worker_of,
)
from bench.planner.search import Depth, Search, Simulated, cells_of
from bench.planner.stores import StoreOffer, StorePrices, at_cell, offers
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat


class CannotPlan(ConfigError):
    """No plan meets the request. The message says why, and what is possible."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The request for a plan. Simulation needs `depth`, and stores also need prices."""

    model: DenseModel
    platform: Platform
    options: ModelOptions
    load: ExpectedLoad
    slo: SloBounds
    max_gpus: int
    depth: Depth | None
    store_prices: StorePrices | None = None


@dataclass(frozen=True, slots=True)
class SizedPools:
    """Enough workers of one kind for the load, by formula and by simulation."""

    worker: PlannedWorker
    estimate: PoolEstimate
    simulated: Simulated | None
    usd_per_million_tokens: float

    @property
    def ranks(self) -> int:
        """Returns the number of GPUs per worker."""
        return self.worker.hardware.gpus

    @property
    def gpus_by_formula(self) -> int:
        """Returns the number of GPUs of all workers, by formula."""
        return self.estimate.pools.total * self.ranks

    @property
    def gpus(self) -> int:
        """Returns the number of GPUs of all workers: by simulation, or else by formula."""
        if self.simulated is None:
            return self.gpus_by_formula
        return self.simulated.total.total * self.ranks


@dataclass(frozen=True, slots=True)
class SavingStep:
    """One option in addition to earlier options. `saves` is a share of the GPUs, or None."""

    label: str
    outcome: SizedPools | CannotPlan
    saves: float | None
    kept: bool


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Two plans, with separate pools and with one pool, and the savings of each option."""

    ask: PlanInput
    disaggregated: SizedPools | CannotPlan
    colocated: SizedPools | CannotPlan
    steps: tuple[SavingStep, ...]
    stores: tuple[StoreOffer, ...] = ()

    @property
    def can_serve(self) -> bool:
        """Returns True if at least one plan meets the bounds."""
        return any(isinstance(one, SizedPools) for one in (self.disaggregated, self.colocated))

    @property
    def best(self) -> SizedPools:
        """Returns the plan with the fewest GPUs; on a tie, the plan with separate pools. Raises
        CannotPlan.
        """
        found = [one for one in (self.disaggregated, self.colocated) if isinstance(one, SizedPools)]
        if not found:
            able = [step.label for step in self.steps if isinstance(step.outcome, SizedPools)]
            hint = f"; it can be done with {able[0]} (and the options before that)" if able else ""
            raise CannotPlan(f"{self.disaggregated}{hint}")
        return min(found, key=lambda one: one.gpus)


def plan_of(ask: PlanInput, *, steps: bool = True) -> CapacityPlan:
    """Sizes separate pools and one pool. With `steps`, also sizes the plans for all options."""
    if ask.model.max_positions is not None:
        longest = ask.load.input_tokens + ask.load.output_tokens
        if longest > ask.model.max_positions:
            raise CannotPlan(
                f"{ask.model.name} takes {ask.model.max_positions:,} tokens, not {longest:,.0f}"
            )
    sizes = _Sizes()
    plan = CapacityPlan(
        ask,
        sizes.of(ask, apart=True),
        sizes.of(ask, apart=False),
        tuple(_steps(ask, sizes)) if steps else (),
    )
    return replace(plan, stores=_with_stores(plan))


def _with_stores(plan: CapacityPlan) -> tuple[StoreOffer, ...]:
    """Returns the best plan with stores of several sizes. Returns nothing if stores cannot help."""
    ask = plan.ask
    if ask.store_prices is None or ask.depth is None or not ask.load.prefix_hit:
        return ()
    if not plan.can_serve:
        return ()
    best = plan.best
    assert best.simulated is not None
    search = Search(ask.load, best.worker, ask.slo, cells=best.simulated.cells, seed=ask.depth.seed)
    start = at_cell(best.estimate, best.simulated)
    usd = ask.platform.usd_per_gpu_hour
    return offers(search, start, best.worker, ask.store_prices, usd=usd)


# ---------------------------------------------------------------- one size


class _Sizes:
    """Caches the sizes of pools, because the plan and its options have some in common."""

    def __init__(self) -> None:
        self._known: dict[tuple[ModelOptions, float, bool], SizedPools | CannotPlan] = {}

    def of(self, ask: PlanInput, *, apart: bool) -> SizedPools | CannotPlan:
        """Returns the sizes of separate pools, or of one pool for both roles."""
        key = (ask.options, ask.load.prefix_hit, apart)
        if key not in self._known:
            try:
                self._known[key] = size(ask, apart=apart)
            except CannotPlan as error:
                self._known[key] = error
        return self._known[key]


def size(ask: PlanInput, *, apart: bool) -> SizedPools:
    """Returns the pools with the fewest GPUs. Raises CannotPlan."""
    estimates: list[tuple[PlannedWorker, PoolEstimate]] = []
    for worker in _able(ask, _fitting(ask)):
        most = ask.max_gpus // worker.hardware.gpus
        estimate = _estimate(ask, worker, load=ask.load, apart=apart, max_workers=most)
        if estimate is not None:
            estimates.append((worker, estimate))
    estimates.sort(key=lambda one: one[1].pools.total * one[0].hardware.gpus)
    for worker, estimate in estimates:
        if ask.depth is None:
            return _sized(ask, worker, estimate, None)
        simulated = _simulated(ask, worker, estimate, apart=apart)
        if simulated is not None:
            return _sized(ask, worker, estimate, simulated)
    how = "simulation" if estimates else "formula"
    raise CannotPlan(f"more than {ask.max_gpus} GPUs are needed, by {how}; see --max-gpus")


def _fitting(ask: PlanInput) -> list[PlannedWorker]:
    """Returns the workers that have memory for the longest request, the smallest first. Raises
    CannotPlan.
    """
    block_size = block_size_for(ask.load.input_tokens)
    found: list[PlannedWorker] = []
    for ranks in ask.platform.ranks():
        worker = worker_of(ask.model, ask.platform, ask.options, ranks=ranks, block_size=block_size)
        if worker is not None and worker.kv_tokens >= ask.load.longest_tokens:
            found.append(worker)
    if not found:
        weights_gb = ask.model.held_bytes(ask.options.weights) / 1e9
        kv_gb = ask.load.longest_tokens * ask.model.kv_token_bytes(ask.options.kv_format) / 1e9
        raise CannotPlan(
            f"{ask.model.name} does not fit: {weights_gb:.1f} GB of weights and {kv_gb:.1f} GB of "
            f"KV for the longest request ({ask.load.longest_tokens:,} tokens), in "
            f"{max(ask.platform.ranks())} × {ask.platform.name} at most"
        )
    return found


def _able(ask: PlanInput, workers: list[PlannedWorker]) -> list[PlannedWorker]:
    """Returns the workers on which a single request meets both bounds. If there are none, raises
    CannotPlan with the least latencies.
    """
    floors = [(worker, floor_of(ask.load, worker)) for worker in workers]
    able = [worker for worker, floor in floors if floor.meets(ask.slo)]
    if able:
        return able
    best = [
        f"{floor.ttft_s * 1e3:.0f} ms and {floor.tpot_s * 1e3:.2f} ms with {worker.hardware.gpus}"
        for worker, floor in floors
    ]
    raise CannotPlan(
        "no number of workers meets the bounds: TTFT of a prompt of "
        f"{ask.load.input_p90:,.0f} tokens (one in ten is longer) and TPOT, of one request alone, "
        f"are at best {', '.join(best)} × {ask.platform.name} a worker"
    )


def _estimate(
    ask: PlanInput, worker: PlannedWorker, *, load: ExpectedLoad, apart: bool, max_workers: int
) -> PoolEstimate | None:
    formula = disaggregated if apart else colocated
    return formula(load, worker, ask.slo, max_workers=max_workers)


def _simulated(
    ask: PlanInput, worker: PlannedWorker, whole: PoolEstimate, *, apart: bool
) -> Simulated | None:
    assert ask.depth is not None
    pools = whole.pools
    smallest = pools.mixed or min(pools.prefill, pools.decode)
    cells = cells_of(ask.load, ask.slo, ask.depth, smallest_pool=smallest)
    search = Search(ask.load, worker, ask.slo, cells=cells, seed=ask.depth.seed)
    most = ask.max_gpus // worker.hardware.gpus // cells.number
    start = _estimate(ask, worker, load=search.load, apart=apart, max_workers=most)
    return None if start is None else search.smallest(start, max_workers=most)


def _sized(
    ask: PlanInput, worker: PlannedWorker, estimate: PoolEstimate, simulated: Simulated | None
) -> SizedPools:
    workers = estimate.pools.total if simulated is None else simulated.total.total
    usd_per_s = workers * worker.hardware.gpus * ask.platform.usd_per_gpu_hour / 3600
    cost = usd_per_s / ask.load.tokens_per_s * 1e6
    return SizedPools(worker, estimate, simulated, cost)


# ---------------------------------------------------------------- options


def _steps(ask: PlanInput, sizes: _Sizes) -> Iterator[SavingStep]:
    """Yields the steps of savings. They start from bf16 in one pool without a cache. An option that
    adds GPUs is dropped.
    """
    bare = replace(ask, options=ModelOptions(), load=replace(ask.load, prefix_hit=0.0))
    outcome = sizes.of(bare, apart=False)
    yield SavingStep("bf16, one pool, no cache", outcome, None, kept=True)
    now, last = bare, outcome
    for change in _changes(ask):
        tried = replace(
            now,
            options=replace(now.options, **change.options),
            load=ask.load if change.has_cache else now.load,
        )
        outcome = sizes.of(tried, apart=change.apart)
        kept = _no_worse(outcome, last)
        yield SavingStep(change.label, outcome, _saved(outcome, last), kept)
        if kept:
            now, last = tried, outcome


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes of one step: options of the model, prefix hits of the load, separate pools."""

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    has_cache: bool = False
    apart: bool = False


def _changes(ask: PlanInput) -> Iterator[_Change]:
    """Yields the changes in order. For bf16 formats, 8 bits are tried."""
    has_fp8 = ask.platform.gpu is None or ask.platform.gpu.has_fp8
    weights, kv_format = ask.options.weights, ask.options.kv_format
    if weights is WeightFormat.BF16:
        weights = WeightFormat.FP8 if has_fp8 else WeightFormat.INT8
    if kv_format is KVFormat.BF16:
        kv_format = KVFormat.FP8_E4M3 if has_fp8 else KVFormat.INT8
    yield _Change(f"weights in {weights}", {"weights": weights})
    yield _Change(f"KV in {kv_format}", {"kv_format": kv_format})
    speculation = ask.options.speculation
    if speculation is not None:
        label = f"speculation, {speculation.accepted:g} of {speculation.drafted} accepted"
        yield _Change(label, {"speculation": speculation})
    if ask.load.prefix_hit:
        yield _Change(f"prefix cache, {ask.load.prefix_hit:.0%} hit", has_cache=True)
    yield _Change("separate pools", apart=True)


def _no_worse(outcome: SizedPools | CannotPlan, last: SizedPools | CannotPlan) -> bool:
    if isinstance(last, CannotPlan):
        return True
    return isinstance(outcome, SizedPools) and outcome.gpus <= last.gpus


def _saved(outcome: SizedPools | CannotPlan, last: SizedPools | CannotPlan) -> float | None:
    if isinstance(outcome, CannotPlan) or isinstance(last, CannotPlan):
        return None
    return 1 - outcome.gpus / last.gpus
