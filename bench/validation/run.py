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

from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from bench.common.machine import hardware
from bench.common.progress import Say
from bench.simulator.cluster import SimulatedPools, SimulationSetup, simulate
from bench.simulator.traces import Trace
from bench.validation.fitting import Fitted, WorkerLimits, fit
from bench.validation.live import deployment, play
from bench.validation.plan import BLOCK_TOKENS, ValidationPlan, made
from bench.validation.recordings import RecordedRun
from bench.validation.results import Samples, SplitComparison, measured_samples, simulated_samples
from deploy.base.defaults import BUNDLED_MODEL
from engine.config import DeviceKind, PoolsConfig, RouterConfig, WorkerConfig
from engine.devices.settings import WorkerSettings, resolve
from router.machine.machine import RouterMachine

KV_MIB = 256  # of each worker: nothing is evicted
NUM_WARM_UP = 8
STRETCH = PoolsConfig().stretch  # pools are fluid, as by default


def measure(plan: ValidationPlan, record_dir: Path, say: Say) -> list[SplitComparison]:
    """Measures and simulates all splits. Raises DeploymentFailed, TooFewSamples."""
    return [_measure(plan, split, record_dir, say) for split in plan.splits]


def _measure(
    plan: ValidationPlan, split: tuple[int, int], record_dir: Path, say: Say
) -> SplitComparison:
    pools, router = SimulatedPools(*split), RouterConfig(seed=plan.seed)
    worker = worker_settings()
    name = f"{split[0]}+{split[1]}"
    ids = count()
    calibrated, measured = [], []
    with deployment(pools, worker, BUNDLED_MODEL) as live:

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


def worker_settings() -> WorkerSettings:
    """Returns the settings of all workers of a deployment."""
    config = WorkerConfig(block_size=BLOCK_TOKENS, kv_mib=KV_MIB)
    return msgspec.structs.replace(resolve(config, DeviceKind.CPU), stretch=STRETCH)


def simulated(
    fitted: Fitted, pools: SimulatedPools, trace: Trace, router: RouterConfig, *, seed: int
) -> Samples:
    """Simulates the trace; `seed` is that of the random variations."""
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
