"""Simulates a load that alternates between two mixes, on fixed pools and with the planner.

    reading   long prompts without common prefixes, short answers: nearly all work is prefill
    writing   a long shared prefix, which is soon cached, a short own part and long answers: nearly
              all work is decoding

Arrivals are Poisson. In each mix the rate nearly saturates the cluster, if the pools have the right
sizes for the mix. The mix changes at once from one phase to the next.

The load is played on each fixed split of the workers, and on pools whose sizes the planner sets.

| result               |       |                                                              |
|----------------------|-------|--------------------------------------------------------------|
| goodput/best_fixed   | 1/s   | requests that met both bounds: with the best fixed split     |
| goodput/planner      | 1/s   | with the planner, which starts from even pools               |
| goodput/fixed_P+D    | 1/s   | with each fixed split                                        |
| ratio                |       | planner over best fixed split                                |
| attainment/…         | share | requests that met both bounds, of all requests               |
| react/first_flip     | s     | longest time from a change of the mix to the first flip      |
| react/settled        | s     | longest time from a change until the pools keep their sizes  |
|                      |       | to the end of the phase, within a tenth of all workers       |
| flips, moved, lost   |       | changed roles; moved sequences; requests that failed         |

Each run has its own seed. The best fixed split depends on the seed, so it is known only after the
run. In all runs, the router knows the bounds and refuses requests that would miss them. A refused
request counts as a miss, not as lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, cycle, islice
from math import exp
from random import Random
from typing import Annotated, ClassVar, Self

import typer

from bench.client.load import SloBounds
from bench.common.command import Say
from bench.common.report import Figure, Goals, results_of
from bench.lab.experiment import Experiment, Findings
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulationSetup,
    simulate,
)
from bench.simulator.goodput import latencies_of, meets
from bench.simulator.hardware import hardware_named
from bench.simulator.pools import SimulatedDecision
from bench.simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest
from engine.config import RouterConfig
from engine.errors import ConfigError
from router.machine.machine import RouterMachine
from router.machine.requests import Failed
from router.planning.planner import PlannerRules


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Requests of one kind. Lengths are log-normal, and at most twice their medians."""

    rate_per_s: float  # requests/s for each worker of the cluster
    shared_tokens: int
    input_tokens: int  # median tokens of the prompt, without the shared prefix
    output_tokens: int  # median tokens of the answer
    spread: float = 0.3


READING = RequestMix(0.72, 0, 16384, 100)
WRITING = RequestMix(1.06, 8192, 512, 1500)


@dataclass(frozen=True, slots=True)
class TurningLoad:
    """A load of several phases. Each phase has one mix, and mixes alternate."""

    num_phases: int
    phase_s: float
    mixes: Sequence[RequestMix] = (READING, WRITING)

    @property
    def duration_s(self) -> float:
        """Returns the seconds of all phases together."""
        return self.num_phases * self.phase_s

    def trace(self, num_workers: int, seed: int) -> Trace:
        """Returns the requests. Their rate nearly saturates a cluster of this size."""
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


STEADY = 0.1  # share of all workers; pools whose sizes differ by less count as equal
PATIENCE_S = 120.0  # queue timeout; a request that waits longer has missed its bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticStudy(Experiment):
    """Simulate an alternating load on fixed splits of the workers and on planned pools."""

    NAME: ClassVar = "elastic"
    QUICK: ClassVar = "Once, 6 workers, short phases: under 50 s."
    GOALS: ClassVar = Goals({"ratio": 1.3, "lost": 0.0}, at_most=("lost",))
    MIXES: ClassVar[tuple[RequestMix, ...]] = (READING, WRITING)

    hardware: Annotated[str, typer.Option(help="A profile.")] = "h200-qwen3-32b-tp2"
    workers: Annotated[int, typer.Option(min=2, help="Simulated workers.")] = 32
    phases: Annotated[
        int, typer.Option(min=1, help="Phases, which alternate between reading and writing.")
    ] = 4
    phase_s: Annotated[float, typer.Option(min=1.0, help="Length of a phase in seconds.")] = 120.0
    step: Annotated[int, typer.Option(min=1, help="Fixed splits tried: 2, 2 + step, …")] = 2
    slo_ttft_ms: Annotated[float, typer.Option(min=1.0, help="Bound on TTFT.")] = 5000.0
    slo_tpot_ms: Annotated[float, typer.Option(min=1.0, help="Bound on TPOT.")] = 25.0
    repeat: Annotated[int, typer.Option(min=1, help="Loads, each with its own seed.")] = 3

    def __post_init__(self) -> None:
        """Raises ConfigError if there are too few workers for a split."""
        if not self.splits:
            raise ConfigError(f"--workers {self.workers}: too few to be split")

    @property
    def splits(self) -> Sequence[int]:
        """Returns the numbers of prefill workers of all fixed splits. Each split leaves two workers
        per role, or one in small clusters.
        """
        least = 2 if self.workers > 8 else 1
        return range(least, self.workers - least + 1, self.step)

    @property
    def turns(self) -> TurningLoad:
        """Returns the alternating load."""
        return TurningLoad(self.phases, self.phase_s, self.MIXES)

    @property
    def slo(self) -> SloBounds:
        """Returns the bounds that requests should meet."""
        return SloBounds.from_ms(self.slo_ttft_ms, self.slo_tpot_ms)

    @property
    def rules(self) -> PlannerRules:
        """Returns the planner's rules."""
        return PlannerRules(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s)

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        load = f"a load that changes every {self.phase_s:g} s"
        return f"simulated: {load}, {self.workers} × {self.hardware}"

    def quick(self) -> Self:
        """Returns a study with one load of two short phases."""
        phase_s, workers = min(self.phase_s, 45.0), min(self.workers, 6)
        return replace(self, workers=workers, phases=2, phase_s=phase_s, step=1, repeat=1)

    def measure(self, say: Say) -> Findings:
        """Simulates one load for each seed."""
        seeds = range(self.seed, self.seed + self.repeat)
        splits = ",".join(map(str, self.splits))
        return Findings(
            results_of([self._figures(seed, say) for seed in seeds]), config={"splits": splits}
        )

    def _figures(self, seed: int, say: Say) -> dict[str, Figure]:
        trace = self.turns.trace(self.workers, seed)
        fixed: dict[str, ElasticRun] = {}
        for prefill in self.splits:
            name = f"fixed_{prefill}+{self.workers - prefill}"
            fixed[name] = self.play(trace, prefill, None)
            say(f"seed {seed}, {name}: {fixed[name].num_good} of {fixed[name].num_requests}")
        planned = self.play(trace, self.workers // 2, self.rules)
        say(f"seed {seed}, planner: {planned.num_good} of {planned.num_requests}")
        return figures_of(self, fixed, planned)

    def play(self, trace: Trace, num_prefill: int, rules: PlannerRules | None) -> "ElasticRun":
        """Plays the load on the pools. With `rules`, the planner changes the pools."""
        config = RouterConfig(
            seed=0,
            max_queue=len(trace.requests),
            queue_timeout_s=PATIENCE_S,
            slo_ttft_s=self.slo.ttft_s,
            slo_tpot_s=self.slo.tpot_s,
        )
        pools = SimulatedPools(num_prefill, self.workers - num_prefill)
        hardware = hardware_named(self.hardware)
        setup = SimulationSetup(hardware, pools, max_answer_tokens=MAX_ANSWER_TOKENS, rules=rules)
        machine = RouterMachine(config)
        run = simulate(trace, setup, machine)
        return ElasticRun(
            num_good=sum(meets(latencies_of(record), self.slo) for record in run.records),
            num_requests=len(run.records),
            num_lost=sum(isinstance(record.outcome, Failed) for record in run.records),
            num_moved=sum(n for (name, _), n in machine.counters.items() if name == "moved"),
            decisions=run.decisions,
        )


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """Counts and times of one load on one cluster."""

    num_good: int
    num_requests: int
    num_lost: int
    num_moved: int = 0
    decisions: Sequence[SimulatedDecision] = field(default=())

    @property
    def num_flips(self) -> int:
        """Returns the number of orders to change a worker's role."""
        return sum(decision.num_flips for decision in self.decisions)


def figures_of(
    study: ElasticStudy, fixed: dict[str, ElasticRun], planned: ElasticRun
) -> dict[str, Figure]:
    """Returns all figures of one seed."""
    best = max(fixed.values(), key=lambda played: played.num_good)
    named = {"best_fixed": best, "planner": planned, **fixed}
    first_flip_s, settled_s = reactions(planned.decisions, study.turns, study.workers)
    return {
        "ratio": Figure(planned.num_good / best.num_good, ""),
        **{
            f"goodput/{name}": Figure(played.num_good / study.turns.duration_s, "1/s")
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


def reactions(
    decisions: Sequence[SimulatedDecision], turns: TurningLoad, num_workers: int
) -> tuple[float, float]:
    """Returns the longest time from a change of the mix to the first flip, and the longest time to
    steady pools.
    """
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
