"""A load that turns: phases of two mixes by turns, on pools of fixed sizes and on planned ones.

    reading   long prompts that share nothing, short answers: nearly all work is prefill
    writing   a long shared prefix that is cached soon, few tokens of one's own, long answers:
              nearly all work is decoding

Requests come one by one (Poisson) at a rate that nearly fills the cluster in each mix, if its pools
are right for that mix; from one phase to the next the mix changes at once.

    goodput/best_fixed   requests/s that met both bounds, with the best of the fixed splits
    goodput/planner      the same, where the planner sets the pools, from even ones on
    ratio                the one over the other
    goodput/fixed_P+D    of each split
    attainment/…         the same as shares of all requests
    react/first_flip     seconds from a turn to the first flip after it; the longest of all turns
    react/settled        from a turn until the pools stay as they are at the end of the phase, but
                         for a tenth of all workers; the longest of all turns
    flips, moved, lost   changes of role; sequences that went on elsewhere because of one; requests
                         that ended as failed

Runs are seeds. The best split is that of each seed, so known only afterwards. The router knows the
bounds and refuses who would miss them, with fixed pools as with planned ones: who is refused is a
miss, and is not lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, cycle, islice
from math import exp
from random import Random

from bench.client.load import SloBounds
from bench.common.progress import Say
from bench.common.report import Figure, Result, results_of
from bench.elastic.planned import SimulatedDecision
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulatedRun,
    SimulationSetup,
    simulate,
)
from bench.simulator.hardware import HardwareProfile
from bench.simulator.results import latencies_of, meets
from bench.simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest
from engine.config import RouterConfig
from router.machine.requests import Failed
from router.native.machine import native_machine
from router.planning.planner import PlannerRules

GOALS = {"ratio": 1.3, "lost": 0.0}
LEAST_IS_BEST = ("lost",)
PATIENCE_S = 120.0  # who waited for so long has missed its bound, and the run is to end
STEADY = 0.1  # of all workers: pools that differ by less are the same


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Requests of one kind. Lengths are log-normal around their medians, at most twice that."""

    rate_per_s: float  # for each worker of the cluster
    shared_tokens: int
    input_tokens: int  # beyond what is shared, in the median
    output_tokens: int  # in the median
    spread: float = 0.3


READING = RequestMix(0.72, 0, 16384, 100)
WRITING = RequestMix(1.06, 8192, 512, 1500)


@dataclass(frozen=True, slots=True)
class TurningLoad:
    """A load: the mixes by turns, each for so long."""

    num_phases: int
    phase_s: float
    mixes: Sequence[RequestMix] = (READING, WRITING)

    @property
    def duration_s(self) -> float:
        """Of all phases."""
        return self.num_phases * self.phase_s

    def trace(self, num_workers: int, seed: int) -> Trace:
        """The requests, as many as so many workers nearly are too few for."""
        rng = Random(seed)
        fresh = count(sum(_num_blocks(mix.shared_tokens) for mix in self.mixes) + 1)
        requests: list[TraceRequest] = []
        for phase, mix in enumerate(islice(cycle(self.mixes), self.num_phases)):
            first_id = sum(
                _num_blocks(m.shared_tokens) for m in self.mixes[: phase % len(self.mixes)]
            )
            shared = range(first_id, first_id + _num_blocks(mix.shared_tokens))
            for at_s in _arrivals(mix.rate_per_s * num_workers, self.phase_s, rng):
                arrived_s = phase * self.phase_s + at_s
                requests.append(_request(mix, arrived_s, tuple(shared), fresh, rng))
        return Trace("turning", MOONCAKE_BLOCK_TOKENS, tuple(requests))


def _arrivals(rate_per_s: float, until_s: float, rng: Random) -> Iterator[float]:
    at_s = rng.expovariate(rate_per_s)
    while at_s < until_s:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def _request(
    mix: RequestMix, arrived_s: float, shared: tuple[int, ...], fresh: Iterator[int], rng: Random
) -> TraceRequest:
    own = _length(mix.input_tokens, mix.spread, rng)
    input_len = mix.shared_tokens + own
    ids = shared + tuple(islice(fresh, _num_blocks(own)))
    return TraceRequest(arrived_s, input_len, _length(mix.output_tokens, mix.spread, rng), ids)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // MOONCAKE_BLOCK_TOKENS)


def _length(median: int, spread: float, rng: Random) -> int:
    return min(max(round(median * exp(rng.gauss(0.0, spread))), 2), 2 * median)


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """What is compared. `splits` are how many workers prefill, of all."""

    hardware: HardwareProfile
    turns: TurningLoad
    num_workers: int
    splits: Sequence[int]
    seeds: Sequence[int]
    slo: SloBounds

    @property
    def rules(self) -> PlannerRules:
        """The planner's."""
        return PlannerRules(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s)


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """One load on one cluster."""

    num_good: int
    num_requests: int
    num_lost: int
    num_moved: int = 0
    decisions: Sequence[SimulatedDecision] = field(default=())

    @property
    def num_flips(self) -> int:
        """Workers that were told to change."""
        return sum(decision.num_flips for decision in self.decisions)


def measure(plan: ElasticPlan, say: Say) -> tuple[Result, ...]:
    """All figures, one run for each seed."""
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


def figures_of(
    plan: ElasticPlan, fixed: dict[str, ElasticRun], planned: ElasticRun
) -> dict[str, Figure]:
    """What one seed came to."""
    best = max(fixed.values(), key=lambda played: played.num_good)
    named = {"best_fixed": best, "planner": planned, **fixed}
    first_flip_s, settled_s = reactions(planned.decisions, plan.turns, plan.num_workers)
    return {
        "ratio": Figure(planned.num_good / best.num_good, ""),
        **{
            f"goodput/{name}": Figure(played.num_good / plan.turns.duration_s, "1/s")
            for name, played in named.items()
        },
        **{
            f"attainment/{name}": Figure(played.num_good / played.num_requests, "share")
            for name, played in islice(named.items(), 2)
        },
        "react/first_flip": Figure(first_flip_s, "s"),
        "react/settled": Figure(settled_s, "s"),
        "flips": Figure(planned.num_flips, ""),
        "moved": Figure(planned.num_moved, ""),
        "lost": Figure(sum(p.num_lost for p in chain([planned], fixed.values())), ""),
    }


def play(
    plan: ElasticPlan, trace: Trace, num_prefill: int, rules: PlannerRules | None
) -> ElasticRun:
    """The load on so many workers that prefill; with `rules`, as many as the planner says."""
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


def reactions(
    decisions: Sequence[SimulatedDecision], turns: TurningLoad, num_workers: int
) -> tuple[float, float]:
    """Seconds from a turn to the first flip, and until the pools stay; the longest of all turns."""
    first, settled = [0.0], [0.0]
    for phase in range(1, turns.num_phases):
        begin_s, end_s = phase * turns.phase_s, (phase + 1) * turns.phase_s
        during = [one for one in decisions if begin_s <= one.at_s < end_s]
        flips_s = [one.at_s - begin_s for one in during if one.num_flips]
        if not flips_s:
            continue
        last = during[-1].plan.prefill
        off = [abs(one.plan.prefill - last) > STEADY * num_workers for one in during]
        first.append(flips_s[0])
        settled.append(
            max(
                (o.at_s - begin_s for o, is_off in zip(during, off, strict=True) if is_off),
                default=0.0,
            )
        )
    return max(first), max(settled)


def is_met(result: Result) -> bool | None:
    """Whether a goal is reached; None where there is none."""
    goal = GOALS.get(result.name)
    if goal is None:
        return None
    return result.value <= goal if result.name in LEAST_IS_BEST else result.value >= goal
