"""Compares the simulator with real deployments on this machine, split by split.

validation/{split}/{ttft,tpot}_{mean,p50,p99}   error of the simulation, as a share of the
                                                measured figure
                   …/measured, …/simulated      both figures, in milliseconds
                   …/spread                     distance of single measured runs from the
                                                median of the other runs of the same trace: no
                                                simulation can be expected to be closer

For each split of prefill and decode workers:

    1. a calibration load is played on the deployment, and the gateway records it
    2. a test load with another rate and other lengths is played on the same deployment
    3. both are repeated, since machines are not always equally fast
    4. a profile is fitted to the recordings of 1: steps, pulls and messages (see `fitting`)
    5. the trace of 2 is simulated equally often, with the profile and the same router; random
       parts of the measured costs are drawn anew each time

The fit does not use the test load. TTFT and TPOT are measured at the router, in the deployment and
in the simulation, so they do not include HTTP or text. Each worker has one thread.

Two workers on two cores have about a core each. Four workers share the cores with each other and
with the router, so the speed of each worker depends on the other workers (`bench.simulator.crowd`).
Message times depend on the load of the cores too. So each split has its own calibration: the study
does not predict one split or machine from another.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, ClassVar, Self

import msgspec
import typer

from bench.common.command import Say, splits_of
from bench.common.plots import plot_cdfs
from bench.common.report import Goals, Report, Result, Scalar, hardware, result_of
from bench.common.stats import Summary, summarize
from bench.lab.experiment import Experiment, Findings
from bench.lab.validation.fitting import Fitted, WorkerLimits, fit
from bench.lab.validation.live import deployment, play
from bench.lab.validation.recordings import RecordedRun
from bench.simulator.cluster import SimulatedPools, SimulatedRun, SimulationSetup, simulate
from bench.simulator.hardware import write_hardware
from bench.simulator.traces import Trace, TraceRequest
from deploy.base.defaults import BUNDLED_MODEL
from engine.config import DeviceKind, PoolsConfig, RouterConfig, WorkerConfig
from engine.devices.settings import WorkerSettings, resolve
from router.machine.machine import RouterMachine

BLOCK_TOKENS = 16
MAX_INPUT, MIN_INPUT = 1500, 32
MAX_OUTPUT, MIN_OUTPUT = 64, 12


@dataclass(frozen=True, slots=True)
class ValidationLoad:
    """A load with Poisson arrivals and log-normal lengths. Some prompts share a prefix with other
    prompts.

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


def made(load: ValidationLoad, rng: Random, ids: "count[int]") -> Trace:
    """Returns a trace of a load. Its block ids are new, so traces do not share prefixes."""
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


GOALS = Goals({"validation/*_mean": 0.10, "validation/*_p99": 0.20}, at_most=("*",))
Samples = Mapping[str, Sequence[float]]  # samples in seconds, by name


@dataclass(frozen=True, slots=True)
class SplitComparison:
    """The measured and simulated runs of one split."""

    split: tuple[int, int]
    fitted: Fitted
    measured: Sequence[Samples]
    simulated: Sequence[Samples]

    @property
    def name(self) -> str:
        """Returns the name of the split: prefill workers + decode workers."""
        return f"{self.split[0]}+{self.split[1]}"


def measured_samples(told: RecordedRun) -> Samples:
    """Returns TTFT and TPOT of all requests of a recording, measured at the router, in seconds."""
    asked = told.asked.values()
    return _samples([(one.arrived_s, one.times_s) for one in asked])


def simulated_samples(run: SimulatedRun) -> Samples:
    """Returns TTFT and TPOT of all requests of a simulation, in seconds."""
    return _samples([(record.asked.arrived_s, record.times_s) for record in run.records])


def _samples(answers: Sequence[tuple[float, Sequence[float]]]) -> Samples:
    return {
        "ttft": [times_s[0] - arrived_s for arrived_s, times_s in answers],
        "tpot": [(times_s[-1] - times_s[0]) / (len(times_s) - 1) for _, times_s in answers],
    }


def results_of(compared: SplitComparison) -> list[Result]:
    """Returns the error of each figure, with the measured and the simulated figure in
    milliseconds.
    """
    results = []
    for name in ("ttft", "tpot"):
        runs = [_summary(samples[name]) for samples in compared.measured]
        guesses = [_summary(samples[name]) for samples in compared.simulated]
        for statistic in ("mean", "p50", "p99"):
            results += _results(
                f"validation/{compared.name}/{name}_{statistic}",
                [getattr(run, statistic) for run in runs],
                [getattr(guess, statistic) for guess in guesses],
            )
    return results


def _results(name: str, measured_s: Sequence[float], simulated_s: Sequence[float]) -> list[Result]:
    guess_s = median(simulated_s)
    errors = tuple(abs(guess_s / value - 1) for value in measured_s)
    return [
        Result(name, abs(guess_s / median(measured_s) - 1), "share", errors),
        *_spread(name, measured_s),
        result_of(f"{name}/measured", [value * 1000 for value in measured_s], "ms"),
        result_of(f"{name}/simulated", [value * 1000 for value in simulated_s], "ms"),
    ]


def _spread(name: str, measured_s: Sequence[float]) -> list[Result]:
    """Returns the distance of each run to the median of the other runs; empty for a single run."""
    if len(measured_s) < 2:
        return []
    others_s = [median([*measured_s[:i], *measured_s[i + 1 :]]) for i in range(len(measured_s))]
    apart = [abs(a / b - 1) for a, b in zip(measured_s, others_s, strict=True)]
    return [result_of(f"{name}/spread", apart, "share")]


def _summary(values_s: Sequence[float]) -> Summary:
    summary = summarize(values_s)
    assert summary is not None
    return summary


QUICK_REQUESTS = 25  # requests of each quick run, which arrive in about 5 s
KV_MIB = 256  # KV memory of a worker, large enough that no block is evicted
NUM_WARM_UP = 8
STRETCH = PoolsConfig().stretch  # pools are fluid, which is the default


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationStudy(Experiment):
    """Play one trace on real deployments and in the simulator, and say how far they differ."""

    NAME: ClassVar = "validation"
    QUICK: ClassVar = "Less than a minute: one short run of each split."
    GOALS: ClassVar = GOALS

    splits: Annotated[
        str, typer.Option(metavar="P+D,…", help="Deployments: prefill and decode workers.")
    ] = "1+1,2+2"
    rate: Annotated[float, typer.Option(min=0.1, help="Requests/s to one prefill worker.")] = 5.0
    requests: Annotated[int, typer.Option(min=10, help="Requests of the trace.")] = 80
    calibrating: Annotated[
        int, typer.Option(min=10, help="Requests that each calibration takes.")
    ] = 60
    repeat: Annotated[int, typer.Option(min=1, help="Calibrations and measurements, in turns.")] = 5
    record: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep recordings and profiles here.")
    ] = None

    def __post_init__(self) -> None:
        """Raises ConfigError if a split is wrong."""
        splits_of(self.splits)

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return f"{self.requests} requests, {self.repeat} times, and simulated"

    def quick(self) -> Self:
        """Returns a study with one short run of each split."""
        return replace(self, requests=QUICK_REQUESTS, calibrating=QUICK_REQUESTS, repeat=1)

    def load(self, split: tuple[int, int]) -> ValidationLoad:
        """Returns the test load, which is played on deployments and simulated."""
        return ValidationLoad(self._rate_per_s(split), self.requests, 400, 32)

    def calibration(self, split: tuple[int, int]) -> ValidationLoad:
        """Returns the calibration load. It is slower than the test load, with longer prompts,
        shorter answers and fewer shared prefixes.
        """
        rate_per_s = 0.8 * self._rate_per_s(split)
        return ValidationLoad(
            rate_per_s, self.calibrating, 500, 24, spread=0.9, share_with_prefix=0.1
        )

    def _rate_per_s(self, split: tuple[int, int]) -> float:
        """Returns the rate for a split: four workers on two cores are not twice as fast as two."""
        return self.rate * math.sqrt(split[0])

    def measure(self, say: Say) -> Findings:
        """Measures and simulates all splits. Raises DeploymentFailed, TooFewSamples."""
        with tempfile.TemporaryDirectory(prefix="baton-") as scratch:
            folder = self.record or Path(scratch)
            compared = [self._compared(split, folder, say) for split in splits_of(self.splits)]
        if self.record:
            for one in compared:
                write_hardware(one.fitted.hardware, self.record / f"{one.name}.hardware.json")
        found = [result for one in compared for result in results_of(one)]
        config = {name: value for one in compared for name, value in fitted_config(one).items()}
        return Findings(found, config=config, samples=_series_ms(compared))

    def plot(self, report: Report, found: Findings, path: Path) -> None:
        """Draws the distributions of measured and simulated latencies."""
        plot_cdfs(found.samples, path, title=self.title)

    def _compared(self, split: tuple[int, int], record_dir: Path, say: Say) -> SplitComparison:
        pools, router = SimulatedPools(*split), RouterConfig(seed=self.seed)
        worker = worker_settings()
        name = f"{split[0]}+{split[1]}"
        ids = count()
        calibrated, measured = [], []
        with deployment(pools, worker, BUNDLED_MODEL) as live:

            def played(what: str, trace: Trace) -> RecordedRun:
                say(f"{name}: {what}, {len(trace.requests)} requests in {trace.duration_s:.0f} s")
                return play(live, trace, router, record_dir / name)

            warming = made(self.load(split), Random(self.seed + 1), ids).first(NUM_WARM_UP)
            played("warming up", warming)
            for repeat in range(self.repeat):
                calibration = made(self.calibration(split), Random(self.seed + 2 + repeat), ids)
                calibrated.append(played("calibrating", calibration))
                trace = made(self.load(split), Random(self.seed), ids)
                measured.append(measured_samples(played("measuring", trace)))
        limits = WorkerLimits(worker.max_batch_tokens, worker.chunk_tokens)
        cores = hardware().num_cores
        fitted = fit(calibrated, limits, name=f"this machine, {name}", cores=cores)
        say(f"{name}: simulating")
        simulations = [
            simulated(fitted, pools, trace, router, seed=self.seed + repeat)
            for repeat in range(self.repeat)
        ]
        return SplitComparison(split, fitted, measured, simulations)


def fitted_config(one: SplitComparison) -> dict[str, Scalar]:
    """Returns the fitted values of one split, by name, for the report."""
    fitted = one.fitted
    parts: dict[str, Scalar] = {
        "latency_s": fitted.latency_s,
        "gateway_load": fitted.hardware.gateway_load,
    }
    for part in ("prefill", "decode", "pull"):
        cost = getattr(fitted.hardware, part)
        parts |= {f"{part}.{name}": getattr(cost, name) for name in cost.__slots__}
    return {f"{one.name}/{name}": value for name, value in parts.items()}


def _series_ms(compared: Sequence[SplitComparison]) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {}
    for one in compared:
        for name in ("ttft", "tpot"):
            measured = [value * 1000 for samples in one.measured for value in samples[name]]
            title = f"{one.name} {name.upper()}"
            series[f"{title} measured"] = measured
            guessed = [value * 1000 for samples in one.simulated for value in samples[name]]
            series[f"{title} simulated"] = guessed
    return series


def worker_settings() -> WorkerSettings:
    """Returns the settings that all workers of a deployment share."""
    config = WorkerConfig(block_size=BLOCK_TOKENS, kv_mib=KV_MIB)
    return msgspec.structs.replace(resolve(config, DeviceKind.CPU), stretch=STRETCH)


def simulated(
    fitted: Fitted, pools: SimulatedPools, trace: Trace, router: RouterConfig, *, seed: int
) -> Samples:
    """Simulates the trace. `seed` determines the random variations."""
    chances = replace(fitted.chances, seed=seed)
    setup = SimulationSetup(
        fitted.hardware,
        pools,
        latency_s=fitted.latency_s,
        chances=chances,
        leaps=False,
        stretch=STRETCH,
    )
    return simulated_samples(simulate(trace, setup, RouterMachine(router)))
