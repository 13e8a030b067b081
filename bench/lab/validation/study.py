"""Compares the simulator with real deployments on this machine, split by split.

For each split of prefill and decode workers:

    1. a calibration load comes to the deployment, and its gateway records
    2. a test load of another rate and other lengths comes to the same deployment
    3. both are repeated, since machines are not always equally fast
    4. a profile is fitted to the recordings of 1: steps, pulls and messages (see `fitting`)
    5. the trace of 2 is simulated as often, with the profile and the same router; random parts of
       the measured costs are drawn anew each time

The fit sees nothing of the test load. TTFT and TPOT are taken at the router on both sides, so
neither includes HTTP or text. Each worker has one thread.

Two workers on two cores have about a core each. Four share the cores with each other and with the
router, so the speed of each depends on the others (see `crowd`). Message times depend on that too.
So each split is calibrated on itself: this predicts no machine from another one.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Self

import msgspec
import typer

from bench.common.command import splits_of
from bench.common.machine import hardware
from bench.common.plots import plot_cdfs
from bench.common.progress import Say
from bench.common.report import Report, Scalar
from bench.lab.experiment import Experiment, Findings
from bench.lab.validation.figures import (
    GOALS,
    Samples,
    SplitComparison,
    measured_samples,
    results_of,
    simulated_samples,
)
from bench.lab.validation.fitting import Fitted, WorkerLimits, fit
from bench.lab.validation.live import deployment, play
from bench.lab.validation.loads import BLOCK_TOKENS, ValidationLoad, made
from bench.lab.validation.recordings import RecordedRun
from bench.simulator.cluster import SimulatedPools, SimulationSetup, simulate
from bench.simulator.hardware import write_hardware
from bench.simulator.traces import Trace
from deploy.base.defaults import BUNDLED_MODEL
from engine.config import DeviceKind, PoolsConfig, RouterConfig, WorkerConfig
from engine.devices.settings import WorkerSettings, resolve
from router.machine.machine import RouterMachine

QUICK_REQUESTS = 25  # requests of each quick run: they arrive in about 5 s
KV_MIB = 256  # KV memory per worker, so large that nothing is evicted
NUM_WARM_UP = 8
STRETCH = PoolsConfig().stretch  # pools are fluid, as by default


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
        """Raises ConfigError for wrong splits."""
        splits_of(self.splits)

    @property
    def title(self) -> str:
        """Returns the line above the table."""
        return f"{self.requests} requests, {self.repeat} times, and simulated"

    def quick(self) -> Self:
        """Returns one short run of each split."""
        return replace(self, requests=QUICK_REQUESTS, calibrating=QUICK_REQUESTS, repeat=1)

    def load(self, split: tuple[int, int]) -> ValidationLoad:
        """Returns the test load, which is played and simulated."""
        return ValidationLoad(self._rate_per_s(split), self.requests, 400, 32)

    def calibration(self, split: tuple[int, int]) -> ValidationLoad:
        """Returns the calibration load: slower, longer prompts, shorter answers, fewer common
        prefixes.
        """
        rate_per_s = 0.8 * self._rate_per_s(split)
        return ValidationLoad(
            rate_per_s, self.calibrating, 500, 24, spread=0.9, share_with_prefix=0.1
        )

    def _rate_per_s(self, split: tuple[int, int]) -> float:
        """Four workers on two cores are not twice as fast as two."""
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
        """Draws the distributions, measured and simulated."""
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
    """Returns the fitted values of one split, by name."""
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
    """Returns the settings of all workers of a deployment."""
    config = WorkerConfig(block_size=BLOCK_TOKENS, kv_mib=KV_MIB)
    return msgspec.structs.replace(resolve(config, DeviceKind.CPU), stretch=STRETCH)


def simulated(
    fitted: Fitted, pools: SimulatedPools, trace: Trace, router: RouterConfig, *, seed: int
) -> Samples:
    """Simulates the trace; `seed` seeds the random variations."""
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
