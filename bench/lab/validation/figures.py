"""How far simulated figures are from measured ones. Pure.

validation/{split}/{ttft,tpot}_{mean,p50,p99}   error of the simulation, as a share of the
                                                measured figure
                   …/measured, …/simulated      both figures, in milliseconds
                   …/spread                     how far single measured runs are from the
                                                median of the others, for the same trace: no
                                                simulation can be expected to be nearer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.common.goals import Goals
from bench.common.report import Result, result_of
from bench.common.stats import Summary, summarize
from bench.lab.validation.fitting import Fitted
from bench.lab.validation.recordings import RecordedRun
from bench.simulator.cluster import SimulatedRun

GOALS = Goals({"validation/*_mean": 0.10, "validation/*_p99": 0.20}, at_most=("*",))
Samples = Mapping[str, Sequence[float]]  # seconds, by name


@dataclass(frozen=True, slots=True)
class SplitComparison:
    """The measured and simulated runs of one split."""

    split: tuple[int, int]
    fitted: Fitted
    measured: Sequence[Samples]
    simulated: Sequence[Samples]

    @property
    def name(self) -> str:
        """Prefill workers + decode workers."""
        return f"{self.split[0]}+{self.split[1]}"


def measured_samples(told: RecordedRun) -> Samples:
    """Returns TTFT and TPOT of all requests of a recording, at the router, in seconds."""
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
    """Returns each error, with the measured and the simulated figure in milliseconds."""
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
    """Returns the distance of each run to the median of the others; empty for one run."""
    if len(measured_s) < 2:
        return []
    others_s = [median([*measured_s[:i], *measured_s[i + 1 :]]) for i in range(len(measured_s))]
    apart = [abs(a / b - 1) for a, b in zip(measured_s, others_s, strict=True)]
    return [result_of(f"{name}/spread", apart, "share")]


def _summary(values_s: Sequence[float]) -> Summary:
    summary = summarize(values_s)
    assert summary is not None
    return summary
