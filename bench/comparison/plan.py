"""What `bench simulator` compares. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulator.hardware import HardwareProfile
from bench.simulator.traces import Trace


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """One comparison; `splits` are (prefill, decode) workers, TTFT is that of the first."""

    trace: Trace
    hardware: HardwareProfile
    splits: Sequence[tuple[int, int]]
    num_for_goodput: int
    ttft_s: float = 5.0
    tpot_s: float = 0.025
    stretch: float | None = None  # of fluid pools, as in `SimulationSetup`; not for round-robin
    seed: int = 0
