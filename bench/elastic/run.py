"""Simulates the load of `bench elastic` on fixed splits and on planned pools."""

from bench.client.load import SloBounds
from bench.common.progress import Say
from bench.common.report import Figure, Result, results_of
from bench.elastic.plan import ElasticPlan
from bench.elastic.results import ElasticRun, figures_of
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulatedRun,
    SimulationSetup,
    simulate,
)
from bench.simulator.figures.latencies import latencies_of, meets
from bench.simulator.traces import Trace
from engine.config import RouterConfig
from router.machine.requests import Failed
from router.native.machine import native_machine
from router.planning.planner import PlannerRules

PATIENCE_S = 120.0  # a request that waits longer has missed its bound


def measure(plan: ElasticPlan, say: Say) -> tuple[Result, ...]:
    """Returns all figures, with one run for each seed."""
    return results_of([_figures(plan, seed, say) for seed in plan.seeds])


def _figures(plan: ElasticPlan, seed: int, say: Say) -> dict[str, Figure]:
    trace = plan.turns.trace(plan.num_workers, seed)
    fixed: dict[str, ElasticRun] = {}
    for prefill in plan.splits:
        name = f"fixed_{prefill}+{plan.num_workers - prefill}"
        fixed[name] = play(plan, trace, prefill, None)
        say(f"seed {seed}, {name}: {fixed[name].num_good} of {fixed[name].num_requests}")
    planned = play(plan, trace, plan.num_workers // 2, plan.rules)
    say(f"seed {seed}, planner: {planned.num_good} of {planned.num_requests}")
    return figures_of(plan, fixed, planned)


def play(
    plan: ElasticPlan, trace: Trace, num_prefill: int, rules: PlannerRules | None
) -> ElasticRun:
    """Plays the load with fixed pools; with `rules`, the planner changes them."""
    config = RouterConfig(
        seed=0,
        max_queue=len(trace.requests),
        queue_timeout_s=PATIENCE_S,
        slo_ttft_s=plan.slo.ttft_s,
        slo_tpot_s=plan.slo.tpot_s,
    )
    pools = SimulatedPools(num_prefill, plan.num_workers - num_prefill)
    setup = SimulationSetup(plan.hardware, pools, max_answer_tokens=MAX_ANSWER_TOKENS, rules=rules)
    machine = native_machine(config)
    run = simulate(trace, setup, machine)
    num_moved = sum(n for (name, _), n in machine.counters.items() if name == "moved")
    return _played(run, plan.slo, num_moved)


def _played(run: SimulatedRun, slo: SloBounds, num_moved: int) -> ElasticRun:
    return ElasticRun(
        num_good=sum(meets(latencies_of(record), slo) for record in run.records),
        num_requests=len(run.records),
        num_lost=sum(isinstance(record.outcome, Failed) for record in run.records),
        num_moved=num_moved,
        decisions=run.decisions,
    )
