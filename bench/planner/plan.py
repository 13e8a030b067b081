"""Plans capacity: the GPUs that a load needs, in which pools, and what each option saves.

A formula decides the number of GPUs of a worker. Candidates hold the model and the longest request,
and one request alone meets both bounds. The candidate with the fewest GPUs in all is taken. The
number of workers is then found by simulation, unless that is turned off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.client.load import SloBounds
from bench.planner.load import ExpectedLoad, PoolEstimate, colocated, disaggregated, floor_of
from bench.planner.model import DenseModel
from bench.planner.pricing import (
    ModelOptions,
    PlannedWorker,
    Platform,
    Speculation,
    block_size_for,
    worker_of,
)
from bench.planner.search import Depth, Search, Simulated, cells_of
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat


class CannotPlan(ConfigError):
    """No plan meets the request; the message says why, and what is possible."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The request for a plan. Without `depth` nothing is simulated."""

    model: DenseModel
    platform: Platform
    options: ModelOptions
    load: ExpectedLoad
    slo: SloBounds
    max_gpus: int
    depth: Depth | None


@dataclass(frozen=True, slots=True)
class SizedPools:
    """Enough workers of `ranks` GPUs each."""

    ranks: int
    worker: PlannedWorker
    estimate: PoolEstimate
    simulated: Simulated | None
    usd_per_million_tokens: float

    @property
    def gpus_by_formula(self) -> int:
        """GPUs of all workers, by formula."""
        return self.estimate.pools.total * self.ranks

    @property
    def gpus(self) -> int:
        """GPUs of all workers as simulated, or else by formula."""
        if self.simulated is None:
            return self.gpus_by_formula
        return self.simulated.total.total * self.ranks


@dataclass(frozen=True, slots=True)
class SavingStep:
    """One option on top of earlier ones; `saves` is a share of the GPUs, or None."""

    label: str
    outcome: SizedPools | CannotPlan
    saves: float | None
    kept: bool


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The plan with separate pools and with one, and the savings option by option."""

    ask: PlanInput
    disaggregated: SizedPools | CannotPlan
    colocated: SizedPools | CannotPlan
    steps: tuple[SavingStep, ...]

    @property
    def best(self) -> SizedPools:
        """The way with the fewest GPUs; separate pools on a tie. Raises CannotPlan."""
        found = [one for one in (self.disaggregated, self.colocated) if isinstance(one, SizedPools)]
        if not found:
            able = [step.label for step in self.steps if isinstance(step.outcome, SizedPools)]
            hint = f"; it can be done with {able[0]} (and the options before that)" if able else ""
            raise CannotPlan(f"{self.disaggregated}{hint}")
        return min(found, key=lambda one: one.gpus)


def plan_of(ask: PlanInput, *, steps: bool = True) -> CapacityPlan:
    """Sizes separate pools and one pool and, with `steps`, all options."""
    if ask.model.max_positions is not None:
        longest = ask.load.input_tokens + ask.load.output_tokens
        if longest > ask.model.max_positions:
            raise CannotPlan(
                f"{ask.model.name} takes {ask.model.max_positions:,} tokens, not {longest:,.0f}"
            )
    sizes = _Sizes()
    return CapacityPlan(
        ask,
        sizes.of(ask, apart=True),
        sizes.of(ask, apart=False),
        tuple(_steps(ask, sizes)) if steps else (),
    )


# ---------------------------------------------------------------- one size


class _Sizes:
    """Caches sizes, since the plan and its options share some."""

    def __init__(self) -> None:
        self._known: dict[tuple[ModelOptions, float, bool], SizedPools | CannotPlan] = {}

    def of(self, ask: PlanInput, *, apart: bool) -> SizedPools | CannotPlan:
        """Returns the size with separate pools, or with one pool for both roles."""
        key = (ask.options, ask.load.prefix_hit, apart)
        if key not in self._known:
            try:
                self._known[key] = size(ask, apart=apart)
            except CannotPlan as error:
                self._known[key] = error
        return self._known[key]


def size(ask: PlanInput, *, apart: bool) -> SizedPools:
    """Returns pools with the fewest GPUs. Raises CannotPlan."""
    able = _able(ask, _fitting(ask))
    estimates = [
        (ranks, worker, estimate)
        for ranks, worker in able
        if (
            estimate := _estimate(
                ask, worker, load=ask.load, apart=apart, max_workers=ask.max_gpus // ranks
            )
        )
    ]
    estimates.sort(key=lambda one: (one[2].pools.total * one[0], one[0]))
    for ranks, worker, estimate in estimates:
        if ask.depth is None:
            return _sized(ask, ranks, worker, estimate, None)
        simulated = _simulated(ask, worker, estimate, apart=apart)
        if simulated is not None:
            return _sized(ask, ranks, worker, estimate, simulated)
    how = "simulation" if estimates else "formula"
    raise CannotPlan(f"more than {ask.max_gpus} GPUs are needed, by {how}; see --max-gpus")


def _fitting(ask: PlanInput) -> list[tuple[int, PlannedWorker]]:
    """Returns (GPUs, worker) with room for the longest request. Raises CannotPlan."""
    block_size = block_size_for(ask.load.input_tokens)
    found: list[tuple[int, PlannedWorker]] = []
    for ranks in ask.platform.ranks():
        worker = worker_of(ask.model, ask.platform, ask.options, ranks=ranks, block_size=block_size)
        if worker is not None and worker.kv_tokens >= ask.load.longest_tokens:
            found.append((ranks, worker))
    if not found:
        weights_gb = ask.model.held_bytes(ask.options.weights) / 1e9
        kv_gb = ask.load.longest_tokens * ask.model.kv_token_bytes(ask.options.kv_format) / 1e9
        raise CannotPlan(
            f"{ask.model.name} does not fit: {weights_gb:.1f} GB of weights and {kv_gb:.1f} GB of "
            f"KV for the longest request ({ask.load.longest_tokens:,} tokens), in "
            f"{max(ask.platform.ranks())} × {ask.platform.name} at most"
        )
    return found


def _able(
    ask: PlanInput, workers: list[tuple[int, PlannedWorker]]
) -> list[tuple[int, PlannedWorker]]:
    """Returns workers on which one request meets both bounds. Raises CannotPlan with the floor."""
    floors = [(ranks, worker, floor_of(ask.load, worker)) for ranks, worker in workers]
    able = [(ranks, worker) for ranks, worker, floor in floors if floor.meets(ask.slo)]
    if able:
        return able
    best = [f"{f.ttft_s * 1e3:.0f} ms and {f.tpot_s * 1e3:.2f} ms with {r}" for r, _, f in floors]
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
    ask: PlanInput,
    ranks: int,
    worker: PlannedWorker,
    estimate: PoolEstimate,
    simulated: Simulated | None,
) -> SizedPools:
    workers = estimate.pools.total if simulated is None else simulated.total.total
    usd_per_s = workers * ranks * ask.platform.usd_per_gpu_hour / 3600
    cost = usd_per_s / ask.load.tokens_per_s * 1e6
    return SizedPools(ranks, worker, estimate, simulated, cost)


# ---------------------------------------------------------------- options


def _steps(ask: PlanInput, sizes: _Sizes) -> Iterator[SavingStep]:
    """Yields steps from bf16 in one pool without a cache; an option that adds GPUs is dropped."""
    bare = replace(ask, options=ModelOptions(), load=replace(ask.load, prefix_hit=0.0))
    outcome = sizes.of(bare, apart=False)
    yield SavingStep("bf16, one pool, no cache", outcome, None, kept=True)
    now, last = bare, outcome
    for label, changed in _options(ask):
        tried = replace(
            now,
            options=_merged(now.options, changed),
            load=replace(now.load, prefix_hit=changed.prefix_hit or now.load.prefix_hit),
        )
        outcome = sizes.of(tried, apart=changed.apart)
        kept = _no_worse(outcome, last)
        yield SavingStep(label, outcome, _saved(outcome, last), kept)
        if kept:
            now, last = tried, outcome


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes of one step; None and zero change nothing."""

    weights: WeightFormat | None = None
    kv_format: KVFormat | None = None
    speculation: Speculation | None = None
    prefix_hit: float = 0.0
    apart: bool = False


def _options(ask: PlanInput) -> Iterator[tuple[str, _Change]]:
    """Yields the options in order; bf16 formats are tried in 8 bits."""
    has_fp8 = ask.platform.gpu is None or ask.platform.gpu.has_fp8
    weights, kv_format = ask.options.weights, ask.options.kv_format
    if weights is WeightFormat.BF16:
        weights = WeightFormat.FP8 if has_fp8 else WeightFormat.INT8
    if kv_format is KVFormat.BF16:
        kv_format = KVFormat.FP8_E4M3 if has_fp8 else KVFormat.INT8
    yield f"weights in {weights}", _Change(weights=weights)
    yield f"KV in {kv_format}", _Change(kv_format=kv_format)
    speculation = ask.options.speculation
    if speculation is not None:
        label = f"speculation, {speculation.accepted:g} of {speculation.drafted} accepted"
        yield label, _Change(speculation=speculation)
    if ask.load.prefix_hit:
        hit = ask.load.prefix_hit
        yield f"prefix cache, {hit:.0%} hit", _Change(prefix_hit=hit)
    yield "separate pools", _Change(apart=True)


def _merged(options: ModelOptions, change: _Change) -> ModelOptions:
    return ModelOptions(
        change.weights or options.weights,
        change.kv_format or options.kv_format,
        change.speculation or options.speculation,
    )


def _no_worse(outcome: SizedPools | CannotPlan, last: SizedPools | CannotPlan) -> bool:
    if isinstance(last, CannotPlan):
        return True
    return isinstance(outcome, SizedPools) and outcome.gpus <= last.gpus


def _saved(outcome: SizedPools | CannotPlan, last: SizedPools | CannotPlan) -> float | None:
    if isinstance(outcome, CannotPlan) or isinstance(last, CannotPlan):
        return None
    return 1 - outcome.gpus / last.gpus
