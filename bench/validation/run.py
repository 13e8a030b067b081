"""Whether the simulator tells the truth: one trace on real deployments, and in the simulator.

For each split of prefill and decode workers, on this machine:

    1. a calibration load comes upon the deployment, and its gateway records
    2. another load, of another rate and other lengths, comes upon the same deployment
    3. both again, some times: machines are not always equally fast, and both have to see it
    4. a profile is fitted to the recordings of 1: steps, pulls and messages (see `fitting`)
    5. the trace of 2 is simulated as often, with the profile and the same router; what is not
       always the same in 1 falls differently each time

Nothing of 2 is known to 4. TTFT and TPOT of both are seen at the router: requests come to it as
from the HTTP side, and there is neither HTTP nor text in either. Workers have one thread each.

Two workers on two cores have about a core each. Four have to share them, and with the router: how
fast each is depends on what the others do (see `crowd`). What messages take depends on that too, so
a split is calibrated by runs of the same split. It is no prediction of one machine from another.

    validation/{split}/{ttft,tpot}_{mean,p99}   how far the simulated figure is from the measured
                                                one, as a share of that; beside it, both, and
                      …/spread                  how far single measured runs are from the median of
                                                the others, the trace being the same: nobody can be
                                                told to be nearer to the truth than it is to itself
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import median

from bench.common.machine import hardware
from bench.common.progress import Say
from bench.common.report import Result
from bench.common.stats import summarize
from bench.simulator.cluster import SimulatedPools, SimulatedRun, SimulationSetup, simulate
from bench.simulator.traces import Trace, TraceRequest
from bench.validation.fitting import Fitted, WorkerLimits, fit
from bench.validation.live import deployment, play
from bench.validation.recordings import RecordedRun
from engine.config import RouterConfig, WorkerConfig
from engine.errors import ConfigError
from router.native.machine import native_machine

MODEL = Path(__file__).parents[2] / "engine" / "model" / "bundled" / "target"
BLOCK_TOKENS = 16
KV_MIB = 256  # of each worker: nothing is evicted
MAX_INPUT, MIN_INPUT = 1500, 32
MAX_OUTPUT, MIN_OUTPUT = 64, 12
NUM_WARM_UP = 8
GOALS = {"mean": 0.10, "p99": 0.20}
QUICK_REQUESTS = 25  # of each run, instead of all: they come in about 5 s

Samples = Mapping[str, Sequence[float]]  # seconds, by name


@dataclass(frozen=True, slots=True)
class ValidationLoad:
    """Poisson arrivals, log-normal lengths; some prompts begin like others.

    Lengths are medians; `spread` is the deviation of their logarithm.
    """

    rate_per_s: float
    num_requests: int
    input_tokens: int
    output_tokens: int
    spread: float = 0.7
    share_with_prefix: float = 0.3
    num_prefixes: int = 3
    prefix_tokens: int = 192


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """What is done for each split."""

    splits: Sequence[tuple[int, int]] = ((1, 1), (2, 2))
    rate_per_s: float = 5.0  # of the test's load, for a split with one prefill worker
    num_requests: int = 80
    num_calibrating: int = 60
    num_repeats: int = 5
    seed: int = 0

    def load(self, split: tuple[int, int]) -> ValidationLoad:
        """What is played and simulated."""
        return ValidationLoad(self._rate_per_s(split), self.num_requests, 400, 32)

    def calibration(self, split: tuple[int, int]) -> ValidationLoad:
        """Fewer at once, longer and more different prompts, shorter answers, less in common."""
        return ValidationLoad(
            0.8 * self._rate_per_s(split),
            self.num_calibrating,
            500,
            24,
            spread=0.9,
            share_with_prefix=0.1,
        )

    def _rate_per_s(self, split: tuple[int, int]) -> float:
        """Four workers on two cores are not twice as fast as two."""
        return self.rate_per_s * math.sqrt(split[0])


@dataclass(frozen=True, slots=True)
class SplitComparison:
    """One split: what was measured, several times, and what was simulated."""

    split: tuple[int, int]
    fitted: Fitted
    measured: Sequence[Samples]
    simulated: Sequence[Samples]

    @property
    def name(self) -> str:
        """Prefill workers + decode workers."""
        return f"{self.split[0]}+{self.split[1]}"


def splits_of(text: str) -> tuple[tuple[int, int], ...]:
    """The splits in "1+1,2+2". Raises ConfigError."""
    try:
        parts = [part.split("+") for part in text.split(",")]
        splits = tuple((int(prefill), int(decode)) for prefill, decode in parts)
    except ValueError as error:
        raise ConfigError(f"--splits: {text!r} is not PREFILL+DECODE,…") from error
    if min(min(split) for split in splits) < 1:
        raise ConfigError("--splits: workers of both roles are needed")
    return splits


def measure(plan: ValidationPlan, record_dir: Path, say: Say) -> list[SplitComparison]:
    """All splits. Raises DeploymentFailed, NotEnough."""
    return [_measure(plan, split, record_dir, say) for split in plan.splits]


def _measure(
    plan: ValidationPlan, split: tuple[int, int], record_dir: Path, say: Say
) -> SplitComparison:
    pools, router = SimulatedPools(*split), RouterConfig(seed=plan.seed)
    worker = WorkerConfig(block_size=BLOCK_TOKENS, kv_mib=KV_MIB)
    name = f"{split[0]}+{split[1]}"
    ids = count()
    calibrated, measured = [], []
    with deployment(pools, worker, MODEL) as live:

        def played(what: str, trace: Trace) -> RecordedRun:
            say(f"{name}: {what}, {len(trace.requests)} requests in {trace.duration_s:.0f} s")
            return play(live, trace, router, record_dir / name)

        warming = made(plan.load(split), Random(plan.seed + 1), ids).first(NUM_WARM_UP)
        played("warming up", warming)
        for repeat in range(plan.num_repeats):
            calibration = made(plan.calibration(split), Random(plan.seed + 2 + repeat), ids)
            calibrated.append(played("calibrating", calibration))
            trace = made(plan.load(split), Random(plan.seed), ids)
            measured.append(measured_samples(played("measuring", trace)))
    limits = WorkerLimits(worker.max_batch_tokens, worker.chunk_tokens)
    cores = hardware().num_cores
    fitted = fit(calibrated, limits, name=f"this machine, {name}", cores=cores)
    say(f"{name}: simulating")
    simulations = [
        simulated(fitted, pools, trace, router, seed=plan.seed + repeat)
        for repeat in range(plan.num_repeats)
    ]
    return SplitComparison(split, fitted, measured, simulations)


def simulated(
    fitted: Fitted, pools: SimulatedPools, trace: Trace, router: RouterConfig, *, seed: int
) -> Samples:
    """What a simulation of the trace comes to; `seed` is that of what is left to chance."""
    chances = replace(fitted.chances, seed=seed)
    setup = SimulationSetup(
        fitted.hardware,
        pools,
        latency_s=fitted.latency_s,
        chances=chances,
        leaps=False,
        prefills_locally=True,
    )
    return simulated_samples(simulate(trace, setup, native_machine(router)))


# ---------------------------------------------------------------- loads


def made(load: ValidationLoad, rng: Random, ids: "count[int]") -> Trace:
    """A trace of such a load. Its blocks have the next ids, so no two traces share anything."""
    num_blocks = load.prefix_tokens // BLOCK_TOKENS
    prefixes = [[next(ids) for _ in range(num_blocks)] for _ in range(load.num_prefixes)]
    requests = []
    at_s = 0.0
    for _ in range(load.num_requests):
        at_s += rng.expovariate(load.rate_per_s)
        input_len = _length(load.input_tokens, load.spread, (MIN_INPUT, MAX_INPUT), rng)
        output_len = _length(load.output_tokens, load.spread, (MIN_OUTPUT, MAX_OUTPUT), rng)
        begins = rng.choice(prefixes) if rng.random() < load.share_with_prefix else []
        length = max(input_len, len(begins) * BLOCK_TOKENS + 1)
        own = [next(ids) for _ in range(-(-length // BLOCK_TOKENS) - len(begins))]
        requests.append(TraceRequest(at_s, length, output_len, (*begins, *own)))
    return Trace("validation", BLOCK_TOKENS, tuple(requests))


def _length(middle: int, spread: float, bounds: tuple[int, int], rng: Random) -> int:
    length = round(middle * math.exp(rng.gauss(0.0, spread)))
    return min(max(length, bounds[0]), bounds[1])


# ---------------------------------------------------------------- what came of it


def measured_samples(told: RecordedRun) -> Samples:
    """TTFT and TPOT of all requests of a recording, at the router."""
    asked = told.asked.values()
    return _samples([(one.arrived_s, one.times_s) for one in asked])


def simulated_samples(run: SimulatedRun) -> Samples:
    """The same of a simulation."""
    return _samples([(record.asked.arrived_s, record.times_s) for record in run.records])


def _samples(answers: Sequence[tuple[float, Sequence[float]]]) -> Samples:
    return {
        "ttft": [times_s[0] - arrived_s for arrived_s, times_s in answers],
        "tpot": [(times_s[-1] - times_s[0]) / (len(times_s) - 1) for _, times_s in answers],
    }


def results_of(compared: SplitComparison) -> list[Result]:
    """How far off each figure is, and both of them beside it, in milliseconds."""
    results = []
    for name in ("ttft", "tpot"):
        runs = [_summary(samples[name]) for samples in compared.measured]
        guesses = [_summary(samples[name]) for samples in compared.simulated]
        for statistic in ("mean", "p50", "p99"):
            results += _results(
                f"validation/{compared.name}/{name}_{statistic}",
                [run[statistic] for run in runs],
                [guess[statistic] for guess in guesses],
            )
    return results


def _results(name: str, measured_s: Sequence[float], simulated_s: Sequence[float]) -> list[Result]:
    guess_s = median(simulated_s)
    errors = tuple(abs(guess_s / value - 1) for value in measured_s)
    off = Result(name, abs(guess_s / median(measured_s) - 1), "share", errors)
    both = {
        "measured": tuple(value * 1000 for value in measured_s),
        "simulated": tuple(value * 1000 for value in simulated_s),
    }
    return [
        off,
        *_spread(name, measured_s),
        *(Result(f"{name}/{kind}", median(runs), "ms", runs) for kind, runs in both.items()),
    ]


def _spread(name: str, measured_s: Sequence[float]) -> list[Result]:
    """How far each run is from the median of the others; nothing where there is but one."""
    if len(measured_s) < 2:
        return []
    others_s = [median([*measured_s[:i], *measured_s[i + 1 :]]) for i in range(len(measured_s))]
    apart = tuple(abs(a / b - 1) for a, b in zip(measured_s, others_s, strict=True))
    return [Result(f"{name}/spread", median(apart), "share", apart)]


def _summary(values_s: Sequence[float]) -> dict[str, float]:
    summary = summarize(values_s)
    assert summary is not None
    return {"mean": summary.mean, "p50": summary.p50, "p99": summary.p99}


def goal_of(name: str) -> float | None:
    """The greatest share by which a figure may be off; None where nothing is promised."""
    statistic = name.rpartition("_")[2]
    return GOALS.get(statistic)
