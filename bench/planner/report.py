"""Converts a plan to a report and to text. Results of formulas and of simulations have separate
columns.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.common.report import Figure, Scalar
from bench.planner.load import num_conversations
from bench.planner.plan import CannotPlan, CapacityPlan, PlanInput, SizedPools
from bench.planner.search import NEEDED, Simulated
from bench.planner.stores import cheapest, mib_text, take_bytes_per_s
from bench.simulator.cluster import SimulatedPools

ASSUMPTIONS = (
    "arrivals are Poisson, lengths log-normal (--spread), no request longer than four times the "
    "mean; a loop of steps runs at its price: no stragglers, no failures",
    "options change prices by the roofline; accuracy is not considered, and gains of real "
    "kernels are often smaller",
    "prefix hits: prompts continue earlier ones, as conversations do; the simulation finds them "
    "only where they are still cached",
)


def config_of(ask: PlanInput) -> dict[str, Scalar]:
    """Returns the request for a plan as a flat mapping."""
    speculation = ask.options.speculation
    return {
        "model": ask.model.name,
        "platform": ask.platform.name,
        "prices_from": ask.platform.source,
        "rps": ask.load.rate_per_s,
        "input_tokens": ask.load.input_tokens,
        "output_tokens": ask.load.output_tokens,
        "prefix_hit": ask.load.prefix_hit,
        "spread": ask.load.spread,
        "pause_s": ask.load.pause_s,
        "slo_ttft_s": ask.slo.ttft_s,
        "slo_tpot_s": ask.slo.tpot_s,
        "weights": str(ask.options.weights),
        "kv_format": str(ask.options.kv_format),
        "accepted": speculation.accepted if speculation else 0.0,
        "drafted": speculation.drafted if speculation else 0,
        "draft_cost": speculation.draft_cost if speculation else 0.0,
        "max_gpus": ask.max_gpus,
        "usd_per_gpu_hour": ask.platform.usd_per_gpu_hour,
        "simulated_requests": ask.depth.num_requests if ask.depth else 0,
        **_price_config(ask),
    }


def _price_config(ask: PlanInput) -> dict[str, Scalar]:
    prices = ask.store_prices
    return {} if prices is None else asdict(prices)


def figures_of(plan: CapacityPlan) -> dict[str, Figure]:
    """Returns all figures. If a figure has both kinds, the names end in `/formula` and
    `/simulated`.
    """
    best = plan.best
    model, options = plan.ask.model, plan.ask.options
    figures = {
        "memory/weights": Figure(best.worker.weights_bytes, "B"),
        "memory/kv": Figure(best.worker.kv_bytes, "B"),
        "memory/kv_tokens": Figure(best.worker.kv_tokens, "tokens"),
        "memory/kv_token": Figure(model.kv_token_bytes(options.kv_format), "B"),
        "gpus": Figure(best.gpus, ""),
        "cost/per_million_tokens": Figure(best.usd_per_million_tokens, "USD"),
    }
    for name, sized in _ways(plan):
        if isinstance(sized, SizedPools):
            figures |= {f"{name}/{thing}": figure for thing, figure in _figures(sized)}
    for index, step in enumerate(plan.steps):
        if isinstance(step.outcome, SizedPools):
            name = f"options/{index}_{step.label.replace(' ', '_')}"
            figures[f"{name}/gpus"] = Figure(step.outcome.gpus, "")
            cost = step.outcome.usd_per_million_tokens
            figures[f"{name}/cost_per_million_tokens"] = Figure(cost, "USD")
    return figures | dict(_store_figures(plan))


def _store_figures(plan: CapacityPlan) -> Iterator[tuple[str, Figure]]:
    for offer in plan.stores:
        if offer.simulated is not None:
            name = f"stores/{offer.label.replace(' ', '_')}"
            yield f"{name}/gpus", Figure(offer.gpus, "")
            yield f"{name}/stores", Figure(offer.num_stores, "")
            yield f"{name}/prefix_hits", Figure(offer.simulated.prefix_hits, "share")
            yield f"{name}/cost_per_million_tokens", Figure(offer.usd_per_million_tokens, "USD")
    cheap = cheapest(plan.stores)
    if cheap is not None:
        saved = 1 - cheap.usd_per_million_tokens / plan.best.usd_per_million_tokens
        yield "stores/saved", Figure(saved, "share")


def _figures(sized: SizedPools) -> Iterator[tuple[str, Figure]]:
    estimate, simulated = sized.estimate, sized.simulated
    yield "gpus_of_a_worker", Figure(sized.ranks, "")
    yield "cost_per_million_tokens", Figure(sized.usd_per_million_tokens, "USD")
    yield "gpus/formula", Figure(sized.gpus_by_formula, "")
    yield from _pool_figures(estimate.pools, "formula")
    yield "prefill_busy/formula", Figure(estimate.prefill_busy, "share")
    yield "ttft_p90/formula", Figure(estimate.ttft_p90_s * 1000, "ms")
    yield "tpot/formula", Figure(estimate.tpot_s * 1000, "ms")
    yield "running/formula", Figure(estimate.running, "")
    yield "kv_used/formula", Figure(estimate.kv_used, "share")
    if simulated is None:
        return
    yield "gpus/simulated", Figure(sized.gpus, "")
    yield from _pool_figures(simulated.total, "simulated")
    yield "cells/simulated", Figure(simulated.cells.number, "")
    yield "attainment/simulated", Figure(simulated.attainment, "share")
    yield "prefix_hits/simulated", Figure(simulated.prefix_hits, "share")
    for role, share in simulated.busy.items():
        yield f"{role}_busy/simulated", Figure(share, "share")
    for name, value_s in (
        ("ttft_p90", simulated.ttft_p90_s),
        ("tpot_p90", simulated.tpot_p90_s),
    ):
        if value_s is not None:
            yield f"{name}/simulated", Figure(value_s * 1000, "ms")


def _pool_figures(pools: SimulatedPools, kind: str) -> Iterator[tuple[str, Figure]]:
    for role in ("prefill", "decode", "mixed"):
        yield f"{role}_workers/{kind}", Figure(getattr(pools, role), "")


def _ways(plan: CapacityPlan) -> tuple[tuple[str, SizedPools | CannotPlan], ...]:
    return (("separate_pools", plan.disaggregated), ("one_pool", plan.colocated))


# ---------------------------------------------------------------- text


def print_plan(console: Console, plan: CapacityPlan) -> None:
    """Prints memory, both plans, the savings of options and stores, and the assumptions."""
    best = plan.best
    for line in _memory_lines(plan.ask, best):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_ways_table(plan))
    if plan.steps:
        console.print(_steps_table(plan))
    if plan.stores:
        console.print(_stores_table(plan))
        console.print(_verdict(plan), highlight=False, soft_wrap=True)
    for line in _notes(plan):
        console.print(Text(line, style="dim"), soft_wrap=True)


def title_of(plan: CapacityPlan) -> str:
    """Returns a title with the load, the GPUs that it needs, and their cost."""
    ask, load, best = plan.ask, plan.ask.load, plan.best
    how = "by simulation" if best.simulated else "by formula"
    price = best.usd_per_million_tokens
    return (
        f"{load.rate_per_s:g} requests/s of {load.input_tokens:g} tokens in and "
        f"{load.output_tokens:g} out with {ask.model.name}: {_gpus(ask, best)}, {how}; "
        f"{price:.3f} USD a million tokens"
    )


def _gpus(ask: PlanInput, best: SizedPools) -> str:
    between = "×" if ask.platform.gpu else "GPUs of"
    return f"{best.gpus} {between} {ask.platform.name}"


def _memory_lines(ask: PlanInput, best: SizedPools) -> Iterator[str]:
    model, worker = ask.model, best.worker
    token_kib = model.kv_token_bytes(ask.options.kv_format) / 1024
    yield (
        f"weights {worker.weights_bytes / 1e9:.1f} GB in {ask.options.weights}; KV "
        f"{token_kib:g} KiB a token in {ask.options.kv_format}"
    )
    gpus = "1 GPU" if best.ranks == 1 else f"{best.ranks} GPUs, tensor parallel,"
    yield (
        f"a worker of {gpus} has {worker.kv_bytes / 1e9:.1f} GB for KV: {worker.kv_tokens:,} tokens"
    )


def _ways_table(plan: CapacityPlan) -> Table:
    table = Table("", box=box.SIMPLE_HEAD, padding=(0, 1))
    columns: list[list[str]] = []
    for name, sized in _ways(plan):
        heading = name.replace("_", " ")
        if isinstance(sized, CannotPlan):
            continue
        table.add_column(f"{heading}\nformula", justify="right")
        columns.append(_formula_cells(sized))
        if sized.simulated is not None:
            table.add_column(f"{heading}\nsimulated", justify="right")
            columns.append(_simulated_cells(sized, sized.simulated))
    for label, *cells in zip(_ROWS, *columns, strict=True):
        table.add_row(label, *cells)
    return table


_ROWS = (
    "GPUs",
    "workers",
    "prefill busy",
    "decode busy",
    "TTFT p90, ms",
    "TPOT, ms",
    "sequences a worker",
    "KV memory used",
    "met both",
    "prefix hits",
)


def _formula_cells(sized: SizedPools) -> list[str]:
    estimate = sized.estimate
    return [
        str(sized.gpus_by_formula),
        _pools(estimate.pools),
        f"{estimate.prefill_busy:.0%}",
        "",
        f"{estimate.ttft_p90_s * 1000:,.0f}",
        f"mean {estimate.tpot_s * 1000:.1f}",
        f"{estimate.running:.1f}",
        f"{estimate.kv_used:.0%}",
        "",
        "",
    ]


def _simulated_cells(sized: SizedPools, simulated: Simulated) -> list[str]:
    busy = simulated.busy
    ttft_s, tpot_s = simulated.ttft_p90_s, simulated.tpot_p90_s
    return [
        str(sized.gpus),
        _pools(simulated.total),
        _share(busy.get("prefill", busy.get("mixed"))),
        _share(busy.get("decode", busy.get("mixed"))),
        "" if ttft_s is None else f"{ttft_s * 1000:,.0f}",
        "" if tpot_s is None else f"p90 {tpot_s * 1000:.1f}",
        "",
        "",
        f"{simulated.attainment:.1%}",
        f"{simulated.prefix_hits:.0%}",
    ]


def _steps_table(plan: CapacityPlan) -> Table:
    is_simulated = plan.ask.depth is not None
    table = Table("each on top of those before", box=box.SIMPLE_HEAD, padding=(0, 1))
    headers = ["GPUs\nformula", *(["GPUs\nsimulated"] if is_simulated else [])]
    for header in (*headers, "workers", "GPUs\nsaved", "USD a\nmillion"):
        table.add_column(header, justify="right")
    for step in plan.steps:
        sized = step.outcome
        if isinstance(sized, CannotPlan):
            table.add_row(step.label, "cannot")
            continue
        pools = sized.simulated.total if sized.simulated else sized.estimate.pools
        counts = [str(sized.gpus_by_formula), *([str(sized.gpus)] if is_simulated else [])]
        table.add_row(
            step.label if step.kept else f"({step.label}: left out)",
            *counts,
            f"{_pools(pools)} × {sized.ranks}",
            "" if step.saves is None else f"{step.saves:.0%}",
            f"{sized.usd_per_million_tokens:.3f}",
        )
    return table


def _stores_table(plan: CapacityPlan) -> Table:
    """Returns a table of the costs without stores and with stores of each size. A size that misses
    the bounds is marked.
    """
    best = plan.best
    assert best.simulated is not None
    table = Table("a store on each node, simulated", box=box.SIMPLE_HEAD, padding=(0, 1))
    for header in ("stores", "GPUs", "workers", "prefix\nhits", "USD\nan hour", "USD a\nmillion"):
        table.add_column(header, justify="right")
    table.add_row(
        "none",
        "0",
        str(best.gpus),
        _pools(best.simulated.total),
        f"{best.simulated.prefix_hits:.0%}",
        f"{best.gpus * plan.ask.platform.usd_per_gpu_hour:.2f}",
        f"{best.usd_per_million_tokens:.3f}",
    )
    for offer in plan.stores:
        if offer.simulated is None:
            table.add_row(offer.label, "misses a bound")
            continue
        table.add_row(
            offer.label,
            str(offer.num_stores),
            str(offer.gpus),
            _pools(offer.simulated.total),
            f"{offer.simulated.prefix_hits:.0%}",
            f"{offer.usd_per_hour:.2f}",
            f"{offer.usd_per_million_tokens:.3f}",
        )
    return table


def _verdict(plan: CapacityPlan) -> str:
    """Returns a sentence that says if and by how much a store lowers the cost."""
    best, cheap = plan.best, cheapest(plan.stores)
    if cheap is None:
        return "stores: no tried size meets the bounds"
    saved = 1 - cheap.usd_per_million_tokens / best.usd_per_million_tokens
    if saved <= 0:
        return f"stores: none lowers the cost; the cheapest, {cheap.label}, costs {-saved:.1%} more"
    taken = mib_text(take_bytes_per_s(plan.ask.load, best.worker, cheap.num_stores))
    return (
        f"stores: {cheap.label} on each of {cheap.num_stores} nodes saves {saved:.1%}: "
        f"{cheap.gpus} GPUs, not {best.gpus}; each store has to take {taken} "
        "(store.take_mib_per_s)"
    )


def _notes(plan: CapacityPlan) -> Iterator[str]:
    ask = plan.ask
    for name, sized in _ways(plan):
        if isinstance(sized, CannotPlan):
            yield f"{name.replace('_', ' ')}: {sized}"
    for step in plan.steps:
        if isinstance(step.outcome, CannotPlan):
            yield f"{step.label}: {step.outcome}"
    yield f"prices: {ask.platform.source}; {ask.platform.usd_per_gpu_hour:g} USD a GPU and hour"
    if ask.depth is not None and plan.best.simulated is not None:
        yield _simulation_note(ask, plan.best.simulated)
    if plan.stores:
        yield from _store_notes(plan)
    for assumption in ASSUMPTIONS:
        yield f"assumed: {assumption}"


def _store_notes(plan: CapacityPlan) -> Iterator[str]:
    ask, simulated = plan.ask, plan.best.simulated
    assert simulated is not None
    prices = ask.store_prices
    assert prices is not None
    yield (
        f"stores: {prices.memory_gib_hour_usd:g} USD a GiB of memory and hour, "
        f"{prices.disk_gib_hour_usd:g} USD a GiB of disk and hour; sizes are per store"
    )
    cells = simulated.cells
    rate_per_s = ask.load.rate_per_s / cells.number
    cell = replace(ask.load, rate_per_s=rate_per_s)
    pause_s = num_conversations(cell, cells.num_requests) / rate_per_s
    if pause_s < 0.9 * ask.load.pause_s:
        yield (
            f"stores: {cells.num_requests} requests hold turns {pause_s:.0f} s apart, not "
            f"{ask.load.pause_s:g} s; with more --requests a store may be worth more"
        )


def _simulation_note(ask: PlanInput, simulated: Simulated) -> str:
    assert ask.depth is not None
    cells = simulated.cells
    parts = f" of {cells.number} equal parts of the load" if cells.number > 1 else ""
    return (
        f"simulated: {cells.num_requests} requests{parts}, seed {ask.depth.seed}, "
        f"{cells.spans:.1f} times as long as an answer may take; enough is {NEEDED:.0%} of the "
        "middle half within both bounds; one worker less in any pool is not; shares of the time "
        "are of the whole run, filling and draining included"
    )


def _pools(pools: SimulatedPools) -> str:
    return str(pools.mixed) if pools.mixed else f"{pools.prefill} P + {pools.decode} D"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
