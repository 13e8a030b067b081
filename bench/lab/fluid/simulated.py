"""`bench fluid --simulated`: compares fluid pools with walled splits and mixed workers in two ways.

All settings have the same number of workers and play the same loads, with pools of fixed sizes:

    fluid_P+D        pools that lend each other idle workers
    split_P+D        pools that do not lend, for every split of the workers
    mixed_N_chunk_C  N mixed workers that compute prompts in chunks of C tokens at most

**Bounds.** The first way is DistServe's goodput: a load is sped up as a whole until fewer than nine
of ten requests have TTFT and TPOT inside their bounds. The router knows the bound on TPOT, and
limits the sequences of each worker accordingly. It has no bound on TTFT, so it does not refuse late
prompts. The chunk size of mixed workers trades TTFT for TPOT. Several sizes are tried, and the best
result is used.

**Mixes.** The second way plays mixes by closed loops, as in the live study, but without the noise
of a machine. The settings are fluid pools, the same pools without lending, and mixed workers. No
two prompts share a prefix, and there are no bounds. Rates are measured in the window. A request
that lies partly in the window counts by the share of its tokens in it.

At the rates that are found, a load should last many times longer than the bound on TTFT. In a
shorter load, all requests could arrive at once, wait, and still meet the bound.

**Loads.** `synthetic` are conversations whose lengths are drawn (`bench.simulator.traces`).
`turning` alternates between long prompts and long answers (`bench.lab.elastic`). The other loads
are traces.

| result                        | unit  |                                                        |
|-------------------------------|-------|--------------------------------------------------------|
| loop_fluid/MIX                |       | requests/s of `fluid` over the best other setting      |
| goodput_fluid/best_split/LOAD |       | goodput of `fluid` over that of the best walled split  |
| goodput_fluid/colocated/LOAD  |       | goodput of `fluid` over that of the best mixed workers |
| loop/SETTING/MIX              | 1/s   | requests in a closed loop                              |
| goodput/SETTING/LOAD          | 1/s   | highest rate that keeps the bounds                     |
| attainment/…, ttft_p90/…      |       | fluid, best split and best mixed workers, each at the  |
| tpot_p90/…, busy_ROLE/…       |       | best split's goodput                                   |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random

import msgspec

from bench.client.load import SloBounds
from bench.common.command import Say
from bench.common.report import Figure, Goals, Result, results_of
from bench.common.stats import percentile
from bench.lab.elastic import TurningLoad
from bench.lab.fluid.figures import RAMP_S, WINDOW_S, TokenMix, starts_s
from bench.lab.streams import answered_per_s
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulatedRun,
    SimulationSetup,
    simulate,
    simulate_clients,
)
from bench.simulator.goodput import attained_per_s, attainment, latencies_of
from bench.simulator.hardware import HardwareProfile
from bench.simulator.traces import (
    MOONCAKE_BLOCK_TOKENS,
    Chat,
    Trace,
    TraceRequest,
    read_trace,
    synthetic,
)
from engine.config import PoolsConfig, RouterConfig
from router.machine.machine import RouterMachine

GOALS = Goals(
    {
        "loop_fluid/*": 0.95,
        "goodput_fluid/best_split/*": 1.1,
        "goodput_fluid/colocated/*": 1.0,
    }
)
NUM_HALVINGS = 5  # halvings in the search for a rate; goodput is exact to 2 %
PATIENCE_S = 3600.0  # a timeout that is long enough to answer every request, even late ones


@dataclass(frozen=True, slots=True)
class Loops:
    """The sizes of the closed loops: their clients, and one loop for each mix."""

    mixes: Sequence[TokenMix] = ()
    num_clients: int = 8
    ramp_s: float = RAMP_S
    window_s: float = WINDOW_S
    phase_s: float = 2.5  # seconds of a phase in an alternating mix


@dataclass(frozen=True, slots=True)
class PoolsUse:
    """One setting: roles and chunk size of the workers."""

    name: str
    pools: SimulatedPools
    is_fluid: bool = False
    chunk_tokens: int | None = None  # None: the profile's value


@dataclass(frozen=True, slots=True)
class SimulatedFluidPlan:
    """All settings and loads that are compared. `fluid` and each of `splits` have equally many
    workers.
    """

    hardware: HardwareProfile
    loads: Mapping[str, Trace]
    fluid: SimulatedPools
    splits: Sequence[SimulatedPools]
    chunks: Sequence[int]
    slo: SloBounds
    loops: Loops = field(default_factory=Loops)
    stretch: float = PoolsConfig().stretch
    seed: int = 0
    num_halvings: int = NUM_HALVINGS

    def settings(self) -> Iterator[PoolsUse]:
        """Yields all settings, the fluid one first."""
        yield PoolsUse(f"fluid_{_named(self.fluid)}", self.fluid, is_fluid=True)
        for pools in self.splits:
            yield PoolsUse(f"split_{_named(pools)}", pools)
        total = self.fluid.total
        for chunk in self.chunks:
            pools = SimulatedPools(mixed=total)
            yield PoolsUse(f"mixed_{total}_chunk_{chunk}", pools, chunk_tokens=chunk)


def loads_of(
    names: Sequence[str], num_requests: int, turns: TurningLoad, num_workers: int, seed: int
) -> Mapping[str, Trace]:
    """Returns the loads, by the names that results use. Raises TraceError."""
    loads: dict[str, Trace] = {}
    for name in names:
        if name == "synthetic":
            loads[name] = synthetic(Chat(), num_requests, Random(seed))
        elif name == "turning":
            loads[name] = turns.trace(num_workers, seed)
        else:
            path = Path(name)
            loads[path.stem] = read_trace(path).first(num_requests)
    return loads


def splits_of_all(pools: SimulatedPools) -> list[SimulatedPools]:
    """Returns every split of this number of workers into two pools."""
    return [SimulatedPools(prefill, pools.total - prefill) for prefill in range(1, pools.total)]


def splits_near(pools: SimulatedPools) -> list[SimulatedPools]:
    """Returns this split, and the two splits with one prefill worker more or less."""
    near = range(pools.prefill - 1, pools.prefill + 2)
    return [
        SimulatedPools(prefill, pools.total - prefill)
        for prefill in near
        if 0 < prefill < pools.total
    ]


def study(plan: SimulatedFluidPlan, say: Say) -> tuple[Result, ...]:
    """Returns all figures, with the ratios first."""
    by_mix = [_of_mix(plan, mix, say) for mix in plan.loops.mixes]
    by_load = {load: _of_load(plan, load, say) for load in plan.loads}
    things = dict.fromkeys(thing for figures in by_load.values() for thing in figures)
    ordered = {
        f"{thing}/{load}": figures[thing]
        for thing in things
        for load, figures in by_load.items()
        if thing in figures
    }
    of_mixes = {name: figure for figures in by_mix for name, figure in figures.items()}
    return results_of([of_mixes | ordered])


def setup_of(plan: SimulatedFluidPlan, use: PoolsUse) -> SimulationSetup:
    """Returns the simulation setup of a setting."""
    hardware = plan.hardware
    if use.chunk_tokens is not None:
        hardware = msgspec.structs.replace(hardware, chunk_tokens=use.chunk_tokens)
    return SimulationSetup(hardware, use.pools, stretch=plan.stretch if use.is_fluid else None)


def play(plan: SimulatedFluidPlan, use: PoolsUse, trace: Trace) -> SimulatedRun:
    """Plays a load on the workers of a setting."""
    setup = replace(setup_of(plan, use), max_answer_tokens=MAX_ANSWER_TOKENS)
    router = RouterConfig(
        seed=plan.seed,
        max_queue=len(trace.requests),
        queue_timeout_s=PATIENCE_S,
        slo_tpot_s=plan.slo.tpot_s,
    )
    return simulate(trace, setup, RouterMachine(router))


def requests_per_s(loops: Loops, mix: TokenMix, setup: SimulationSetup, *, seed: int) -> float:
    """Returns the requests/s of a mix, played by a closed loop on an idle cluster."""
    begin_s, fresh = loops.ramp_s, count(1)
    end_s = begin_s + mix.window_s(loops.window_s)
    later_s = iter(starts_s(loops.num_clients, loops.ramp_s))

    def ask(now_s: float) -> TraceRequest | None:
        if now_s >= end_s:
            return None
        at_s = next(later_s, now_s)
        input_len, output_len = mix.lengths_at(at_s - begin_s, loops.phase_s)
        num_blocks = -(-input_len // MOONCAKE_BLOCK_TOKENS)
        return TraceRequest(at_s, input_len, output_len, tuple(islice(fresh, num_blocks)))

    machine = RouterMachine(RouterConfig(seed=seed, max_queue=loops.num_clients))
    run = simulate_clients(loops.num_clients, ask, MOONCAKE_BLOCK_TOKENS, setup, machine)
    return answered_per_s((record.times_s for record in run.records), begin_s, end_s)


def ratios(goodput_per_s: Mapping[str, float]) -> dict[str, Figure]:
    """Returns the ratios of the fluid pools' goodput over the best split's and over the best mixed
    workers'.
    """
    fluid = goodput_per_s[best_of(goodput_per_s, "fluid")]
    kinds = {"best_split": "split", "colocated": "mixed"}
    best = {name: goodput_per_s[best_of(goodput_per_s, kind)] for name, kind in kinds.items()}
    return {
        f"goodput_fluid/{name}": Figure(fluid / theirs, "")
        for name, theirs in best.items()
        if theirs
    }


def best_of(goodput_per_s: Mapping[str, float], kind: str) -> str:
    """Returns the setting of this kind with the highest goodput."""
    names = [name for name in goodput_per_s if name.startswith(f"{kind}_")]
    return max(names, key=lambda name: goodput_per_s[name])


def _of_mix(plan: SimulatedFluidPlan, mix: TokenMix, say: Say) -> dict[str, Figure]:
    found: dict[str, float] = {}
    for use in plan.settings():
        if use.pools in (plan.fluid, SimulatedPools(mixed=plan.fluid.total)):
            setup = setup_of(plan, use)
            found[use.name] = requests_per_s(plan.loops, mix, setup, seed=plan.seed)
            say(f"{mix.name}, {use.name}: {found[use.name]:.2f}/s")
    fluid, *others = found.values()
    return {
        f"loop_fluid/{mix.name}": Figure(fluid / max(others), ""),
        **{f"loop/{name}/{mix.name}": Figure(rate, "1/s") for name, rate in found.items()},
    }


def _of_load(plan: SimulatedFluidPlan, load: str, say: Say) -> dict[str, Figure]:
    trace, uses = plan.loads[load], {use.name: use for use in plan.settings()}
    found: dict[str, float] = {}
    for name, use in uses.items():
        found[name] = attained_per_s(
            trace, partial(play, plan, use), plan.slo, num_halvings=plan.num_halvings
        )
        say(f"{load}, {name}: {found[name]:.2f}/s")
    figures = ratios(found)
    figures |= {f"goodput/{name}": Figure(rate, "1/s") for name, rate in found.items()}
    rate_per_s = found[best_of(found, "split")]
    if rate_per_s:
        at_rate = trace.sped_up(rate_per_s * trace.duration_s / len(trace.requests))
        for kind in ("fluid", "split", "mixed"):
            name = best_of(found, kind)
            run = play(plan, uses[name], at_rate)
            figures |= {f"{thing}/{name}": one for thing, one in _at_rate(run, plan.slo).items()}
    return figures


def _at_rate(run: SimulatedRun, slo: SloBounds) -> dict[str, Figure]:
    """Returns latencies and worker utilisation of a run at a given rate."""
    answered = [one for record in run.records if (one := latencies_of(record)) is not None]
    samples_s = {
        "ttft_p90": [one.ttft_s for one in answered],
        "tpot_p90": [one.tpot_s for one in answered if one.tpot_s is not None],
    }
    busy: dict[str, list[float]] = {}
    for worker in run.workers:
        busy.setdefault(str(worker.role), []).append(worker.busy_s / run.duration_s)
    return {
        "attainment": Figure(attainment(run, slo), "share"),
        **{
            name: Figure(1e3 * percentile(values_s, 90), "ms")
            for name, values_s in samples_s.items()
            if values_s
        },
        **{f"busy_{role}": Figure(sum(s) / len(s), "share") for role, s in busy.items()},
    }


def _named(pools: SimulatedPools) -> str:
    return f"{pools.prefill}+{pools.decode}"
